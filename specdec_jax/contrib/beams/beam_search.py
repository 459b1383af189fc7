"""Beam search with T5X's semantics, the baseline of many seq2seq results.

Length normalisation is that of Wu et al. (https://arxiv.org/abs/1609.08144,
Eq. 14); finished and live sequences are kept apart, as in T5X. `advance` makes
one step from given logits; the loop is in `contrib.beams.speculative_beams`.
"""

import dataclasses
import functools
import operator

import jax
import jax.numpy as jnp

from specdec_jax import arrays, base
from specdec_jax.base import Array
from specdec_jax.decoding import state as state_lib
from specdec_jax.decoding.state import EosId
from specdec_jax.decoding.statistics import Statistics
from specdec_jax.sampling import processors
from specdec_jax.sampling.logits import mask_padding

# The log-probability of a beam that does not exist, as in T5X.
NOTHING = -1.0e7


@base.value
class BeamOutput:
  """The K best sequences of every row, in ascending order.

  Attributes:
    tokens: int32 `[B, K, S]`, prompt included, 0 beyond `lengths`.
    lengths: int32 `[B, K]`; 0 where fewer than K sequences finished.
    scores: float32 `[B, K]`, ascending: the log-probability of what follows the
      prompt, divided by `brevity_penalty`. A row in which no sequence reached
      EOS returns its live ones, with plain log-probabilities.
    is_finished: bool `[B, K]`, whether the sequence ends with EOS.
    has_nan: bool `[B]`, whether the row stopped because of NaN logits.
    statistics: counters. `num_tokens` is of the best sequence; in those of
      drafts, which a speculative search has, a level counts as a token.
  """

  tokens: Array
  lengths: Array
  scores: Array
  is_finished: Array
  has_nan: Array
  statistics: Statistics


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rules:
  """The static settings of a search; see `speculative_beams.generate`."""

  num_beams: int
  alpha: float
  eos_ids: tuple[int, ...]
  vocab_size: int


@base.value
class Search:
  """The state of a search; a row's live sequences have one length.

  `processors` are the prompt's, if any, and `starts` int32 `[B]` its lengths;
  `live` is `[B, K, S]` tokens, `live_log_probs` `[B, K]`; `finished*` are as in
  `BeamOutput`, all others are `[B]`.
  """

  processors: base.Processors | None
  starts: Array | None
  live: Array
  live_log_probs: Array
  lengths: Array
  finished: Array
  finished_lengths: Array
  finished_scores: Array
  max_lengths: Array
  is_active: Array
  has_nan: Array


def checked_rules(
  target: base.LanguageModel,
  num_beams: int,
  alpha: float,
  eos_id: EosId,
  vocab_size: int | None,
) -> Rules:
  """Makes the rules of a search; ValueError if a number is out of range."""
  if num_beams < 1:
    raise ValueError(f'num_beams must be at least 1, got {num_beams}')
  if not 0 <= alpha < float('inf'):
    raise ValueError(f'alpha must be finite and at least 0, got {alpha}')
  return Rules(
    num_beams=num_beams,
    alpha=alpha,
    eos_ids=state_lib.eos_ids(eos_id) or (-1,),
    vocab_size=target.vocab_size if vocab_size is None else vocab_size,
  )


def brevity_penalty(alpha: float, lengths: Array) -> Array:
  """Computes `((5 + length) / 6) ** alpha`, the start token not counted."""
  return ((5.0 + lengths.astype(jnp.float32)) / 6.0) ** alpha


def start(prompt: base.Prompt, *, num_beams: int, max_len: int) -> Search:
  """Starts a search with one live beam per row, the prompt in int32."""
  batch_size, prompt_len = prompt.decoder_tokens.shape
  if prompt.grammar is not None:
    raise ValueError(
      'a beam search takes no grammar (regex, json_schema, grammar)'
    )
  lengths, limits = prompt.decoder_lengths, state_lib.limits(prompt, max_len)
  tokens = jnp.pad(prompt.decoder_tokens, ((0, 0), (0, max_len - prompt_len)))
  live = jnp.repeat(tokens[:, None], num_beams, axis=1)
  nothing = jnp.full((batch_size, num_beams), NOTHING, jnp.float32)
  return Search(
    processors=prompt.processors,
    starts=None if prompt.processors is None else lengths,
    live=live,
    live_log_probs=nothing.at[:, -1].set(0.0),  # the only beam that exists
    lengths=lengths,
    finished=jnp.zeros_like(live),
    finished_lengths=jnp.zeros((batch_size, num_beams), jnp.int32),
    finished_scores=nothing,
    max_lengths=limits,
    is_active=lengths < limits,
    has_nan=jnp.zeros(batch_size, jnp.bool_),
  )


def last_tokens(sequences: Array, lengths: Array) -> Array:
  """Picks each live sequence's last token: `[B, K, S]`, `[B]` to `[B, K]`."""
  last = jnp.broadcast_to(lengths[:, None] - 1, sequences.shape[:2])
  return arrays.pick(sequences, last)


def advance(
  search: Search, logits: Array, is_due: Array, rules: Rules
) -> tuple[Search, Array, Array]:
  """Extends the live sequences of the rows that are due, active ones, bool
  `[B]`, by one token, from logits float32 `[B, K, V]` after each sequence.

  Returns:
    The search after it; int32 `[B, K]`, the sequence that each live one
    continues; and bool `[B]`, the rows that advanced: due and without NaN.
  """
  # Masked after the softmax, as in T5X: scores are the model's own.
  log_probs = mask_padding(rules.vocab_size)(jax.nn.log_softmax(logits))
  log_probs = search.live_log_probs[:, :, None] + _processed(search, log_probs)
  best = jnp.max(log_probs, axis=(1, 2))  # NaN if any is
  is_stuck = (best == -jnp.inf) & ~jnp.any(search.finished_lengths > 0, axis=1)
  has_nan = (jnp.isnan(best) | is_stuck) & is_due
  decided, parents = _decide(search, log_probs, rules)
  is_taken = is_due & ~has_nan

  def choose(old: Array, new: Array) -> Array:
    shape = (-1,) + (1,) * (new.ndim - 1)
    return jnp.where(is_taken.reshape(shape), new, old)

  search = jax.tree.map(choose, search, decided)
  search = dataclasses.replace(
    search,
    is_active=search.is_active & ~has_nan,
    has_nan=search.has_nan | has_nan,
  )
  return search, parents, is_taken


def _processed(search: Search, log_probs: Array) -> Array:
  """Applies the processors to log-probabilities `[B, K, V]` after each live
  sequence, without normalising again, as in transformers."""
  if search.processors is None:
    return log_probs
  num_beams = log_probs.shape[1]
  of_beams = lambda values: jnp.repeat(values, num_beams, axis=0)
  text = base.Context(
    tokens=search.live.reshape(-1, search.live.shape[2]),
    lengths=of_beams(search.lengths),
    processors=jax.tree.map(of_beams, search.processors),
    starts=of_beams(search.starts),
  )
  flat = log_probs.reshape(-1, log_probs.shape[2])
  return processors.after_text(flat, text).reshape(log_probs.shape)


def _decide(
  search: Search, log_probs: Array, rules: Rules
) -> tuple[Search, Array]:
  """Advances the search by the best of `log_probs[B, K, V]`, those of whole
  sequences; also returns the parents of the new live sequences."""
  num_beams, num_ids = log_probs.shape[1:]
  # Each beam may end in each EOS id: 2 beams and 1 EOS need the best 4, so that
  # 2 remain live whatever ends. Entry 7 of 2 x 5 is beam 1 with token 2.
  per_beam = min(1 + len(rules.eos_ids), num_ids, rules.vocab_size)
  log_probs = log_probs.reshape(-1, num_beams * num_ids)
  log_probs, flat = jax.lax.top_k(log_probs, num_beams * per_beam)
  parents, tokens = flat // num_ids, flat % num_ids
  above = arrays.take(search.live, parents)
  candidates = _append(above, tokens, search.lengths)
  is_eos = functools.reduce(operator.or_, [tokens == i for i in rules.eos_ids])

  open_log_probs = jnp.where(is_eos, NOTHING, log_probs)
  live_log_probs, chosen = _best_last(open_log_probs, num_beams)

  lengths = jnp.broadcast_to(search.lengths[:, None] + 1, tokens.shape)
  scores = log_probs / brevity_penalty(rules.alpha, lengths - 1)
  # Half of nothing is still far below any sequence's log-probability.
  has_ended = is_eos & (log_probs > NOTHING / 2)
  join = lambda old, new: jnp.concatenate([old, new], axis=1)
  scores = join(search.finished_scores, jnp.where(has_ended, scores, NOTHING))
  finished_scores, best = _best_last(scores, num_beams)
  finished_lengths = arrays.take(
    join(search.finished_lengths, jnp.where(has_ended, lengths, 0)), best
  )
  new = dataclasses.replace(
    search,
    live=arrays.take(candidates, chosen),
    live_log_probs=live_log_probs,
    lengths=search.lengths + 1,
    finished=arrays.take(join(search.finished, candidates), best),
    finished_lengths=finished_lengths,
    finished_scores=finished_scores,
  )
  new = dataclasses.replace(new, is_active=_can_improve(new, rules.alpha))
  return new, arrays.take(parents, chosen)


def _can_improve(search: Search, alpha: float) -> Array:
  """Returns, bool `[B]`, whether a row has room and a live sequence could still
  beat the worst finished one."""
  # Penalties grow with length, so no descendant can score above this.
  penalties = brevity_penalty(alpha, search.max_lengths)
  bound = search.live_log_probs[:, -1] / penalties
  worst = jnp.min(search.finished_scores, axis=1)
  is_settled = jnp.all(search.finished_lengths > 0, axis=1) & (worst > bound)
  return (search.lengths < search.max_lengths) & ~is_settled


def output(search: Search, starts: Array, counts: Statistics) -> BeamOutput:
  """Returns the finished sequences, or the live ones of rows without any;
  `counts` gain the tokens of the best sequence after `starts`."""
  finished = search.finished_lengths
  is_finished = finished > 0
  use_live = ~jnp.any(is_finished, axis=1)[:, None]
  lengths = jnp.where(use_live, search.lengths[:, None], finished)
  tokens = jnp.where(use_live[:, :, None], search.live, search.finished)
  positions = jnp.arange(tokens.shape[2], dtype=jnp.int32)
  is_committed = positions[None, None, :] < lengths[:, :, None]
  return BeamOutput(
    tokens=jnp.where(is_committed, tokens, 0),
    lengths=lengths,
    scores=jnp.where(use_live, search.live_log_probs, search.finished_scores),
    is_finished=is_finished,
    has_nan=search.has_nan,
    statistics=dataclasses.replace(counts, num_tokens=lengths[:, -1] - starts),
  )


def _append(sequences: Array, tokens: Array, lengths: Array) -> Array:
  """Puts `tokens[B, N]` at positions `lengths[B]` of `sequences[B, N, S]`."""
  positions = jnp.arange(sequences.shape[2], dtype=lengths.dtype)
  is_new = (positions[None, :] == lengths[:, None])[:, None, :]
  return jnp.where(is_new, tokens[:, :, None], sequences)


def _best_last(scores: Array, count: int) -> tuple[Array, Array]:
  """Finds the `count` best of `[B, N]`, ascending, and their indices."""
  best, indices = jax.lax.top_k(scores, count)
  return best[:, ::-1], indices[:, ::-1]  # [3, 1, 2], 2 -> [2, 3], [2, 0]
