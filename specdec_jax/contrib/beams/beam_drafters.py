"""Drafters for beam search: tries below all live sequences of a row (Leviathan
et al., https://arxiv.org/abs/2211.17192, A.4)."""

import jax
import jax.numpy as jnp
import numpy as np

from specdec_jax import arrays, base
from specdec_jax.base import Array, Arrays, Context
from specdec_jax.contrib.beams import beam_trie
from specdec_jax.contrib.beams.beam_trie import BeamDraft, BeamDrafter, Beams
from specdec_jax.decoding.state import EosId
from specdec_jax.drafters.prompt_lookup import prompt_lookup
from specdec_jax.drafters.stateless import check_gamma


def none(num_beams: int) -> BeamDrafter:
  """Drafts nothing: plain beam search, in one cache row for all beams."""

  def propose(
    params: Arrays, beams: Beams, state: Arrays
  ) -> tuple[BeamDraft, Arrays]:
    shape = beams.search.lengths.size, 0, num_beams
    nothing = jnp.zeros(shape, jnp.int32)
    return BeamDraft(tokens=nothing, parents=nothing), state

  return BeamDrafter(
    gamma=0,
    width=num_beams,
    init=lambda params, prompt, capacity: (),
    propose=propose,
  )


def copied(
  num_beams: int,
  *,
  gamma: int,
  max_ngram: int = 3,
  min_ngram: int | None = None,
) -> BeamDrafter:
  """Continues each live sequence as `drafters.prompt_lookup` would, from the
  sequence itself and from the encoder's input.

  A level has one node per sequence, so it can be followed only if no sequence
  has two children among the live ones. Raises ValueError as that function.
  """
  lookup = prompt_lookup(gamma=gamma, max_ngram=max_ngram, min_ngram=min_ngram)

  def init(params: Arrays, prompt: base.Prompt, capacity: int) -> Arrays:
    source = lookup.init(params, prompt, capacity)
    return jax.tree.map(lambda x: jnp.repeat(x, num_beams, axis=0), source)

  def propose(
    params: Arrays, beams: Beams, state: Arrays
  ) -> tuple[BeamDraft, Arrays]:
    live = beams.search.live
    batch_size, _, size = live.shape
    context = Context(
      tokens=live.reshape(batch_size * num_beams, size),
      lengths=jnp.repeat(beams.search.lengths, num_beams),
    )
    draft, state = lookup.propose(params, None, context, state)
    # Node k of every level continues sequence k: 2 rows of 2 beams are chains
    # [0, 1, 0, 1], each node with the parent of its own number.
    chains = jnp.arange(batch_size * num_beams, dtype=jnp.int32) % num_beams
    is_drafted = arrays.is_within(draft.lengths, gamma)

    def by_level(values: Array) -> Array:
      return values.reshape(batch_size, num_beams, gamma).swapaxes(1, 2)

    levels = BeamDraft(
      tokens=by_level(draft.tokens),
      parents=by_level(jnp.where(is_drafted, chains[:, None], -1)),
    )
    return levels, state

  return BeamDrafter(gamma, num_beams, init, propose)


def of_model(
  model: base.LanguageModel,
  *,
  gamma: int,
  width: int,
  eos_id: EosId,
  vocab_size: int | None = None,
) -> BeamDrafter:
  """Drafts the beams of a smaller model: on each of `gamma` levels the `width`
  likeliest continuations of all live sequences together, without ended ones.

  Scores start from the target's, as those of the search will. All levels are
  fed to the model, the last one too, so that its cache has an entry wherever
  the target's has one: what is kept there is kept here, and the next draft
  starts from the same pending tokens.

  Args:
    model: a draft model that takes placements; its params are the drafter's.
    gamma: levels of a draft.
    width: nodes per level. A level is followed only if all live sequences are
      among its nodes: twice the number of beams is a good start.
    eos_id: the search's.
    vocab_size: the search's.

  Raises:
    ValueError: if `gamma` is below 1, or the model takes no placements.
  """
  check_gamma(gamma)
  if model.gather is None:
    raise ValueError(
      'this draft model takes no placements, and cannot draft for a beam search'
    )
  gather = model.gather
  is_open = _open_ids(model.vocab_size, eos_id, vocab_size)

  def propose(
    params: Arrays, beams: Beams, cache: Arrays
  ) -> tuple[BeamDraft, Arrays]:
    search, starts = beams.search, beams.num_entries
    num_beams = search.live.shape[1]
    first = lambda depth: starts + num_beams + (depth - 1) * width

    def feed(tokens, sees, depth, cache, at=None):
      placement = beam_trie.placement(beams, sees, depth, width)
      return model.extend(params, tokens, cache, at, placement=placement)

    def deepen(carry, depth):
      tokens, scores, sees, cache = carry
      logits, cache = feed(tokens, sees, depth - 1, cache)
      tokens, parents, scores = _children(logits, scores, is_open, width)
      sees = beam_trie.below(sees, parents, first(depth))
      return (tokens, scores, sees, cache), (tokens, parents)

    sees = beam_trie.with_own(beams.sees, starts)
    carry = (beams.pending, search.live_log_probs, sees, cache)
    carry, top = deepen(carry, 1)
    depths = jnp.arange(2, gamma + 1, dtype=jnp.int32)
    (last, _, sees, cache), rest = jax.lax.scan(deepen, carry, depths)
    # This call only writes entries. Its logits are read for NaN, with which no
    # draft is made; so whatever moves entries later must wait for the call, or
    # else the compiler would keep a copy of the cache for it.
    logits, cache = feed(
      last, sees, gamma, cache, jnp.zeros_like(search.lengths)
    )
    has_nan = jnp.any(jnp.isnan(logits), axis=(1, 2))
    join = lambda a, b: jnp.moveaxis(jnp.concatenate([a[None], b]), 0, 1)
    tokens, parents = jax.tree.map(join, top, rest)
    parents = jnp.where(has_nan[:, None, None], -1, parents)
    return BeamDraft(tokens=tokens, parents=parents), cache

  return BeamDrafter(
    gamma=gamma,
    width=width,
    init=model.init,
    propose=propose,
    keep=lambda cache, starts, offsets, lengths: model.rewind(
      gather(cache, starts, offsets, gamma * width), lengths
    ),
  )


def _open_ids(
  num_ids: int, eos_id: EosId, vocab_size: int | None
) -> np.ndarray:
  """Returns a bool `[num_ids]`: the tokens that go on with a sequence, which
  do not end it and are no padding of the vocabulary."""
  ids = np.arange(num_ids)
  is_open = ~np.isin(ids, eos_id)
  if vocab_size is not None:
    is_open &= ids < vocab_size
  return is_open


def _children(
  logits: Array, scores: Array, is_open: np.ndarray, width: int
) -> tuple[Array, Array, Array]:
  """Finds the `width` best continuations, by ids of `is_open[V]`, of all
  sequences of a row: their tokens and parents, int32 `[B, width]` each, and
  their scores. The sequences have `scores[B, M]`, and then `logits[B, M, V]`.
  """
  log_probs = scores[:, :, None] + jnp.where(
    is_open[None, None, :], jax.nn.log_softmax(logits), -jnp.inf
  )
  flat = log_probs.reshape(scores.shape[0], -1)
  if width > flat.shape[1]:
    raise ValueError(
      f'{width} nodes of a level are more than the {flat.shape[1]} '
      'continuations that there are'
    )
  # Of flat entries [M * V], 7 with V = 5 is token 2 after sequence 1.
  scores, best = jax.lax.top_k(flat, width)
  return best % is_open.size, best // is_open.size, scores
