"""Alpha as Leviathan et al. define it (Sec. 3.1 and Table 3,
https://arxiv.org/abs/2211.17192): the mean of `sum min(p, q)` over prefixes of
text that the target generates. It uses probabilities, not counts of accepted
tokens, and so needs far fewer tokens for the same precision.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from specdec_jax import arrays
from specdec_jax.base import (
  Array,
  Draft,
  Drafter,
  Params,
  Prompt,
  Verification,
  VerifyFn,
)
from specdec_jax.decoding import speculative
from specdec_jax.decoding.method import Method
from specdec_jax.decoding.state import DecodeState
from specdec_jax.drafters.always_full import always_full
from specdec_jax.launch import progress
from specdec_jax.sampling import distributions
from specdec_jax.theory import estimates
from specdec_jax.verification import decision

_NUM_LAGS = 8
_NOTHING = always_full(0)

# From a draft and `p` after one prefix: a probability of acceptance, `[B]`.
ShareFn = Callable[[Draft, Array], Array]


class Overlaps(NamedTuple):
  """`sum min(p, q)` after each prefix of the generated text.

  Attributes:
    values: float64 `[R, N]`, by row and position in the text.
    is_text: bool `[R, N]`, true for positions before the end of the text.
    is_drafted: bool `[R, N]`, true where the drafter proposed a token.
  """

  values: np.ndarray
  is_text: np.ndarray
  is_drafted: np.ndarray


def shared_mass(draft: Draft, p: Array, lenience: float = 1.0) -> Array:
  """Returns the probability that a drafted token is accepted after one prefix,
  `sum min(p / l, q)`, `[B]` (Leviathan et al., Theorem 3.5 and Appendix A.5).
  """
  if draft.probs is None:
    of_drafted = arrays.pick(p, draft.tokens[:, 0])
    return jnp.minimum(of_drafted / lenience, 1.0)
  return distributions.overlap(p / lenience, draft.probs[:, 0])


def observe(row_keys: Array, draft: Draft, target_probs: Array) -> Verification:
  """A verifier that accepts nothing: the text is that of plain decoding.

  Target probabilities are float32 `[B, 2, V]`, or `[B, 1, V]` without a draft.
  """
  # Every verifier draws next tokens with these keys, as plain decoding does.
  _, next_keys = decision.split_by_purpose(row_keys)
  p = target_probs[:, 0]
  return Verification(
    num_accepted=jnp.zeros_like(draft.lengths),
    next_token=distributions.sample(next_keys, p),
    accept_probs=jnp.zeros(draft.tokens.shape, p.dtype),
  )


def follow(
  row_keys: Array,
  draft: Draft,
  target_probs: Array,
  *,
  verify_fn: VerifyFn,
  drafted: Draft,
) -> Verification:
  """A verifier like `observe`, except that the text is that of `verify_fn`: the
  drafted token if it is accepted, else its correction."""
  # Verifiers take probabilities `[B, 2, V]`. Those after the drafted token do
  # not affect what is read here, so the first ones are repeated.
  verdict = verify_fn(row_keys, drafted, jnp.repeat(target_probs[:, :1], 2, 1))
  is_accepted = verdict.num_accepted > 0
  token = jnp.where(is_accepted, drafted.tokens[:, 0], verdict.next_token)
  seen = observe(row_keys, draft, target_probs)
  return dataclasses.replace(seen, next_token=token)


def passes_rule(draft: Draft, p: Array, verify_fn: VerifyFn) -> Array:
  """Returns the probability, `[B]`, that a rule accepts the drafted token."""
  row_keys = jax.random.split(jax.random.key(0), len(p))
  # The second p, after the drafted token, does not affect the result.
  verdict = verify_fn(row_keys, draft, jnp.stack([p, p], axis=1))
  return verdict.accept_probs[:, 0]


def overlaps(
  params: Params,
  rng_key: Array,
  prompts: Sequence[Prompt],
  *,
  drafters: Sequence[Drafter],
  share_fns: Sequence[ShareFn] = (shared_mass,),
  title: str = '',
  **options: Any,
) -> list[list[Overlaps]]:
  """Generates text with the target, and has every drafter propose each token.

  Args:
    params: weights of the target, and in `drafter` those of each drafter.
    rng_key: as for `speculative.generate`.
    prompts: of one shape.
    drafters: D of them, that draft one token, or trees of one level.
    share_fns: computed for every draft, such as `shared_mass` with several
      leniences.
    title: of a progress bar; empty for none.
    **options: `method`, of which target, `logits_to_probs` and `eos_id` are
      read; `max_len`, as for `speculative.generate`; `num_tokens`, the most new
      tokens per row; and optionally, with one drafter, `verify_fn`: the rule
      that determines the text in place of the target (see `passes_rule`).

  Returns overlaps for every drafter and each of `share_fns`, all on the same
  text. ValueError if logits are NaN.
  """
  options |= {'drafters': drafters, 'share_fns': share_fns}
  compiled = jax.jit(functools.partial(_generate, **options))
  batches = []
  with progress.bar(title, len(prompts), is_shown=bool(title)) as bar:
    for prompt in prompts:
      has_nan, seen = jax.device_get(compiled(params, rng_key, prompt))
      if has_nan.any():
        raise ValueError(
          'the logits were not numbers (NaN): nothing to measure'
        )
      # Positions become the last axis: `[N, D, L, B]` is now `[D, L, B, N]`.
      batches.append([np.moveaxis(array, 0, -1) for array in seen])
      bar.advance(1)
  # Join batches along their rows, the last axis but one.
  values, is_text, is_drafted = (
    np.concatenate(parts, axis=-2) for parts in zip(*batches, strict=True)
  )
  # Sums of float32 probabilities may exceed one by their rounding.
  values = np.minimum(values.astype(np.float64), 1.0)
  values = np.where(is_drafted[:, None], values, 0.0)
  return [
    [Overlaps(share, is_text, has_guess) for share in shares]
    for shares, has_guess in zip(values, is_drafted, strict=True)
  ]


def rank_rates(
  params: Params,
  rng_key: Array,
  prompts: Sequence[Prompt],
  *,
  drafter: Drafter,
  **options: Any,
) -> np.ndarray:
  """Measures how often the target chooses the token that a drafter ranks first,
  second, and so on: float64 `[K]`, over all prefixes of the target's text.

  The drafter makes trees of K children of the root, without probabilities; of
  a repeated token the first counts. All else is as for `overlaps`.
  """

  def share_fn(rank: int, draft: Draft, p: Array) -> Array:
    # Of children [7, 9, 7] the third is the same token as the first.
    token = draft.tokens[:, rank, None]
    is_repeated = jnp.any(draft.tokens[:, :rank] == token, axis=1)
    return jnp.where(is_repeated, 0.0, arrays.pick(p, token[:, 0]))

  ranks = range(drafter.gamma)
  share_fns = [functools.partial(share_fn, rank) for rank in ranks]
  params = params._replace(drafter=[params.drafter])
  options |= {'drafters': [drafter], 'share_fns': share_fns}
  [by_rank] = overlaps(params, rng_key, prompts, **options)
  return np.array(
    [overlap.values.sum() / overlap.is_text.sum() for overlap in by_rank]
  )


def _generate(
  params: Params,
  rng_key: Array,
  prompt: Prompt,
  *,
  method: Method,
  drafters: Sequence[Drafter],
  max_len: int,
  num_tokens: int,
  share_fns: Sequence[ShareFn],
  verify_fn: VerifyFn | None = None,
) -> tuple[Array, list[Array]]:
  """Decodes a batch of `overlaps`.

  Returns `has_nan`, bool `[B]`, and by token the values of `share_fns`, float32
  `[N, D, L, B]`, `is_text`, bool `[N, B]`, and `is_drafted`, bool `[N, D, B]`.
  """

  def step(carry: tuple[Array, DecodeState, list[Any], list[Array]]):
    i, state, drafter_states, seen = carry
    # Every drafter proposes a token after the text so far.
    proposals = [
      speculative.propose(
        Params((), weights),
        dataclasses.replace(state, drafter_state=drafter_state),
        drafter,
        vocab_size=method.target.vocab_size,
      )
      for drafter, weights, drafter_state in zip(
        drafters, params.drafter, drafter_states, strict=True
      )
    ]
    drafts = [draft for draft, _ in proposals]
    # One step of the target, or of the rule `verify_fn`.
    verifier: VerifyFn = observe
    if verify_fn is not None:
      [drafted] = drafts
      verifier = functools.partial(follow, verify_fn=verify_fn, drafted=drafted)
    plain = dataclasses.replace(method, drafter=_NOTHING, verify_fn=verifier)
    state, info = speculative.step(params, state, method=plain)
    # Record the values of every draft.
    is_text = info.counts > 0
    p = info.target_probs[:, 0]
    shares = [[share(draft, p) for share in share_fns] for draft in drafts]
    has_guess = jnp.array([draft.lengths > 0 for draft in drafts])
    current = jnp.array(shares), is_text, is_text[None] & has_guess
    # Row i of a buffer holds the values of token i of every row.
    seen = [
      buffer.at[i].set(values)
      for buffer, values in zip(seen, current, strict=True)
    ]
    drafter_states = [after.drafter_state for _, after in proposals]
    return i + 1, state, drafter_states, seen

  state, drafter_states = _init(
    params, rng_key, prompt, method, drafters, max_len
  )
  shape = (num_tokens, len(drafters))
  num_rows = state.done.size
  seen = [
    jnp.zeros((*shape, len(share_fns), num_rows), jnp.float32),
    jnp.zeros((num_tokens, num_rows), bool),
    jnp.zeros((*shape, num_rows), bool),
  ]
  start = (jnp.int32(0), state, drafter_states, seen)
  is_going = lambda carry: (carry[0] < num_tokens) & ~carry[1].done.all()
  _, state, _, seen = jax.lax.while_loop(is_going, step, start)
  return state.has_nan, seen


def _init(
  params: Params,
  rng_key: Array,
  prompt: Prompt,
  method: Method,
  drafters: Sequence[Drafter],
  max_len: int,
) -> tuple[DecodeState, list[Any]]:
  """Returns the state of a loop without drafts, and those of the drafters."""
  undrafted = dataclasses.replace(method, drafter=_NOTHING)
  state = speculative.init(
    params, rng_key, prompt, method=undrafted, max_len=max_len
  )
  drafter_states = []
  cache = state.target_cache
  for drafter, weights in zip(drafters, params.drafter, strict=True):
    # Buffers are as large as those of `speculative.init` for gamma 1.
    arguments = weights, prompt, max_len + 2
    # Heads take the prompt's features from the target's cache, and return it.
    if drafter.reads_target_cache:
      drafter_state, cache = drafter.init(*arguments, state.target_cache)
    else:
      drafter_state = drafter.init(*arguments)
    drafter_states.append(drafter_state)
  return dataclasses.replace(state, target_cache=cache), drafter_states


def acceptance(overlap: Overlaps, *, max_gamma: int) -> dict[str, Any]:
  """Computes alpha, and statistics of how overlaps depend on each other.

  Returns `alpha` over the prefixes with a drafted token; `alpha_interval`, of
  `theory.estimates.ratio`; `num_prefixes` and `num_rows`; `abstained`, the
  share of prefixes without a drafted token; `autocorrelation` of overlaps by
  lag (None: no pairs); and `profile`, the acceptance rate at each of
  `max_gamma` positions of drafts that start anywhere, where a missing token has
  no overlap.
  ValueError if the drafter never proposed a token.
  """
  counts = overlap.is_drafted.sum(1)
  if not counts.sum():
    raise ValueError('the drafter had no guess after any prefix')
  sums = np.where(overlap.is_drafted, overlap.values, 0).sum(1)
  alpha, interval = estimates.ratio(sums, counts)
  return {
    'alpha': alpha,
    'alpha_interval': interval
    and [max(interval[0], 0.0), min(interval[1], 1.0)],
    'num_prefixes': int(counts.sum()),
    'num_rows': int((counts > 0).sum()),
    'abstained': float(1 - counts.sum() / overlap.is_text.sum()),
    'autocorrelation': [
      _autocorrelation(overlap, alpha, lag) for lag in range(1, _NUM_LAGS + 1)
    ],
    'profile': _profile(overlap, max_gamma),
  }


def _autocorrelation(overlap: Overlaps, alpha: float, lag: int) -> float | None:
  """Correlates overlaps with those `lag` tokens later in the same row."""
  # With lag 1, overlaps a b c d give the pairs (a, b), (b, c), (c, d).
  both = overlap.is_drafted[:, lag:] & overlap.is_drafted[:, :-lag]
  centred = np.where(overlap.is_drafted, overlap.values - alpha, 0)
  variance = (centred**2).sum() / overlap.is_drafted.sum()
  if not both.any() or variance < 1e-12:
    return None
  products = (centred[:, lag:] * centred[:, :-lag])[both]
  return float(products.mean() / variance)


def _profile(overlap: Overlaps, max_gamma: int) -> list[float]:
  """Returns acceptance rates by position of drafts that start anywhere."""
  # Overlaps 1, 1, 0.5, 0 of a row give drafts that begin at the first token the
  # products 1, 1, 0.5, those at the second 1, 0.5, 0. The rate of position i is
  # the mean product up to i over that up to i - 1.
  values = np.where(overlap.is_drafted, overlap.values, 0)
  values = np.where(overlap.is_text, values, np.nan)
  reached = np.ones(overlap.is_text.sum())
  rates = []
  for i in range(max_gamma):
    # Drafts that would extend beyond the text's end do not count.
    shifted = np.pad(values[:, i:], ((0, 0), (0, i)), constant_values=np.nan)
    ahead = shifted[overlap.is_text]
    is_inside = ~np.isnan(ahead)
    before = reached[is_inside].mean() if is_inside.any() else 0.0
    reached = reached * np.nan_to_num(ahead)
    after = reached[is_inside].mean() if is_inside.any() else 0.0
    rates.append(float(after / before) if before > 0 else 0.0)
  return rates
