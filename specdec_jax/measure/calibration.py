"""Alpha as Leviathan et al. define it (Sec. 3.1 and Table 3,
https://arxiv.org/abs/2211.17192): the mean of `sum min(p, q)` over prefixes of
text that the target generates. Nothing is counted as accepted or rejected, so
one decode tells much more than its acceptances would.
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
from specdec_jax.launch import progress
from specdec_jax.measure import stopwatch
from specdec_jax.sampling import distributions
from specdec_jax.theory import estimates
from specdec_jax.verification import decision

_NUM_LAGS = 8
_NOTHING = stopwatch.always_full(0)

# From a draft and `p` after one prefix: a chance to pass, `[B]`.
ShareFn = Callable[[Draft, Array], Array]


class Overlaps(NamedTuple):
  """What `sum min(p, q)` was after each prefix of the generated text.

  Attributes:
    values: float64 `[R, N]`, row by row in the text's order.
    is_text: bool `[R, N]`, where there was a prefix and a next token.
    is_drafted: bool `[R, N]`, where the drafter also had a guess.
  """

  values: np.ndarray
  is_text: np.ndarray
  is_drafted: np.ndarray


def shared_mass(draft: Draft, p: Array, lenience: float = 1.0) -> Array:
  """Returns the chance that a guess passes after one prefix, `sum min(p / l,
  q)`, `[B]` (Leviathan et al., Theorem 3.5 and Appendix A.5)."""
  if draft.probs is None:
    of_drafted = arrays.pick(p, draft.tokens[:, 0])
    return jnp.minimum(of_drafted / lenience, 1.0)
  return distributions.overlap(p / lenience, draft.probs[:, 0])


def observe(row_keys: Array, draft: Draft, target_probs: Array) -> Verification:
  """Judges as a rule that accepts nothing: the text is the target's own, token
  by token that of plain decoding. Target probabilities are float32 `[B, 2, V]`,
  or `[B, 1, V]` without a draft."""
  # The keys of next tokens, as every rule has them: the draws are those of
  # plain decoding.
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
  """Judges as `observe`, but the text is that of a rule: the drafted token
  where it accepts it, its correction elsewhere."""
  # Rules take probabilities `[B, 2, V]`, after the drafted token as well: those
  # decide nothing that is read here, and the first stand in for them.
  verdict = verify_fn(row_keys, drafted, jnp.repeat(target_probs[:, :1], 2, 1))
  is_accepted = verdict.num_accepted > 0
  token = jnp.where(is_accepted, drafted.tokens[:, 0], verdict.next_token)
  seen = observe(row_keys, draft, target_probs)
  return dataclasses.replace(seen, next_token=token)


def passes_rule(draft: Draft, p: Array, verify_fn: VerifyFn) -> Array:
  """Returns the chance, `[B]`, that a rule accepts the guess."""
  row_keys = jax.random.split(jax.random.key(0), len(p))
  # The second p would be of the token behind the guess; its draw is not used.
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
  """Lets the target generate, and asks every drafter before every token.

  Args:
    params: weights of the target, and in `drafter` those of each drafter.
    rng_key: as for `speculative.generate`.
    prompts: of one shape.
    drafters: D of them, that draft one token, or trees of one level.
    share_fns: what is recorded of every draft, such as `shared_mass` with
      several leniences.
    title: of a bar meanwhile; empty for none.
    **options: `method`, of which target, `logits_to_probs` and `eos_id` are
      read; `max_len`, as for `speculative.generate`; `num_tokens`, new ones per
      row at most; and `verify_fn`, with one drafter, of a rule that makes the
      text in place of the target: see `passes_rule`.

  Returns for every drafter what each of `share_fns` says, all along one text.
  ValueError if logits are not numbers.
  """
  options |= {'drafters': drafters, 'share_fns': share_fns}
  compiled = jax.jit(functools.partial(_generate, **options))
  parts = []
  with progress.bar(title, len(prompts), is_shown=bool(title)) as bar:
    for prompt in prompts:
      has_nan, seen = jax.device_get(compiled(params, rng_key, prompt))
      if has_nan.any():
        raise ValueError(
          'the logits were not numbers (NaN): nothing to measure'
        )
      # Tokens come last: `[N, D, L, B]` becomes `[D, L, B, N]`.
      parts.append([np.moveaxis(each, 0, -1) for each in seen])
      bar.advance(1)
  values, is_text, is_drafted = (
    np.concatenate(each, axis=-2) for each in zip(*parts, strict=True)
  )
  # Batches are joined along the axis of rows, the last but one by now.
  # Sums of float32 probabilities may exceed one by their rounding.
  values = np.minimum(values.astype(np.float64), 1.0)
  values = np.where(is_drafted[:, None], values, 0.0)
  return [
    [Overlaps(each, is_text, has_guess) for each in own]
    for own, has_guess in zip(values, is_drafted, strict=True)
  ]


def rank_rates(
  params: Params,
  rng_key: Array,
  prompts: Sequence[Prompt],
  *,
  drafter: Drafter,
  **options: Any,
) -> np.ndarray:
  """Measures how often the target says what a drafter ranks first, second, and
  so on: float64 `[K]`, over all prefixes of text that the target generates.

  The drafter makes trees with K children of the root, nothing below and no
  probabilities; where it repeats a token, the first counts. All else is as for
  `overlaps`.
  """

  def share_fn(rank: int, draft: Draft, p: Array) -> Array:
    # Of children [7, 9, 7] the third can pass only where the first has.
    token = draft.tokens[:, rank, None]
    is_repeated = jnp.any(draft.tokens[:, :rank] == token, axis=1)
    return jnp.where(is_repeated, 0.0, arrays.pick(p, token[:, 0]))

  ranks = range(drafter.gamma)
  share_fns = [functools.partial(share_fn, rank) for rank in ranks]
  params = params._replace(drafter=[params.drafter])
  options |= {'drafters': [drafter], 'share_fns': share_fns}
  [found] = overlaps(params, rng_key, prompts, **options)
  return np.array([each.values.sum() / each.is_text.sum() for each in found])


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
  """Decodes a batch of `overlaps`: `has_nan` bool `[B]`, and by token what
  `share_fns` make of the drafts, float32 `[N, D, L, B]`, whether there was
  text, bool `[N, B]`, and whether there was a guess, too, bool `[N, D, B]`."""

  def step(carry: tuple[Array, DecodeState, list[Any], list[Array]]):
    i, state, own, seen = carry
    asked = [
      speculative.propose(
        Params((), weights),
        dataclasses.replace(state, drafter_state=its),
        drafter,
        vocab_size=method.target.vocab_size,
      )
      for drafter, weights, its in zip(
        drafters, params.drafter, own, strict=True
      )
    ]
    drafts = [draft for draft, _ in asked]
    seeing: VerifyFn = observe
    if verify_fn is not None:
      [drafted] = drafts
      seeing = functools.partial(follow, verify_fn=verify_fn, drafted=drafted)
    judging = dataclasses.replace(method, drafter=_NOTHING, verify_fn=seeing)
    state, info = speculative.step(params, state, method=judging)
    is_text = info.counts > 0
    p = info.target_probs[:, 0]
    shares = [[share(draft, p) for share in share_fns] for draft in drafts]
    has_guess = jnp.array([draft.lengths > 0 for draft in drafts])
    now = jnp.array(shares), is_text, is_text[None] & has_guess
    # Token i of every row is row i of what was seen.
    seen = [each.at[i].set(one) for each, one in zip(seen, now, strict=True)]
    return i + 1, state, [after.drafter_state for _, after in asked], seen

  state, own = _init(params, rng_key, prompt, method, drafters, max_len)
  shape, num_rows = (num_tokens, len(drafters)), state.done.size
  seen = [
    jnp.zeros((*shape, len(share_fns), num_rows), jnp.float32),
    jnp.zeros((num_tokens, num_rows), bool),
    jnp.zeros((*shape, num_rows), bool),
  ]
  start = (jnp.int32(0), state, own, seen)
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
  """Makes the state of a loop without drafts, and those of the drafters."""
  undrafted = dataclasses.replace(method, drafter=_NOTHING)
  state = speculative.init(
    params, rng_key, prompt, method=undrafted, max_len=max_len
  )
  own, cache = [], state.target_cache
  for drafter, weights in zip(drafters, params.drafter, strict=True):
    # Buffers as of `speculative.init` for gamma 1.
    arguments = weights, prompt, max_len + 2
    # Heads take the prompt's features out of it, and hand it on.
    if drafter.reads_target_cache:
      its, cache = drafter.init(*arguments, state.target_cache)
    else:
      its = drafter.init(*arguments)
    own.append(its)
  return dataclasses.replace(state, target_cache=cache), own


def acceptance(found: Overlaps, *, max_gamma: int) -> dict[str, Any]:
  """Computes alpha and what the assumption of independence leaves out of it.

  Returns `alpha` over the prefixes with a guess; its interval of
  `theory.estimates.ratio`; counts of both; `abstained`, the share of prefixes
  without a guess; `autocorrelation` of neighbouring overlaps by lag, None where
  there are none; and `profile`, the rate of each of `max_gamma` positions of a
  draft that starts anywhere, no guess counting as no overlap. ValueError if the
  drafter never had a guess.
  """
  counts = found.is_drafted.sum(1)
  if not counts.sum():
    raise ValueError('the drafter had no guess after any prefix')
  sums = np.where(found.is_drafted, found.values, 0).sum(1)
  alpha, interval = estimates.ratio(sums, counts)
  return {
    'alpha': alpha,
    'alpha_interval': interval
    and [max(interval[0], 0.0), min(interval[1], 1.0)],
    'num_prefixes': int(counts.sum()),
    'num_rows': int((counts > 0).sum()),
    'abstained': float(1 - counts.sum() / found.is_text.sum()),
    'autocorrelation': [
      _autocorrelation(found, alpha, lag) for lag in range(1, _NUM_LAGS + 1)
    ],
    'profile': _profile(found, max_gamma),
  }


def _autocorrelation(found: Overlaps, alpha: float, lag: int) -> float | None:
  """Correlates overlaps with those `lag` tokens later in the same row."""
  # With lag 1, overlaps a b c d give the pairs (a, b), (b, c), (c, d).
  both = found.is_drafted[:, lag:] & found.is_drafted[:, :-lag]
  centred = np.where(found.is_drafted, found.values - alpha, 0)
  variance = (centred**2).sum() / found.is_drafted.sum()
  if not both.any() or variance < 1e-12:
    return None
  products = (centred[:, lag:] * centred[:, :-lag])[both]
  return float(products.mean() / variance)


def _profile(found: Overlaps, max_gamma: int) -> list[float]:
  """Returns rates of the positions of drafts that begin at every prefix."""
  # Overlaps 1, 1, 0.5, 0 of a row give drafts that begin at the first token the
  # products 1, 1, 0.5, those at the second 1, 0.5, 0. The rate of position i is
  # the mean product up to i over that up to i - 1.
  values = np.where(found.is_drafted, found.values, 0)
  values = np.where(found.is_text, values, np.nan)
  reached, rates = np.ones(found.is_text.sum()), []
  for i in range(max_gamma):
    # A draft that the text's end cuts short says nothing of what is beyond.
    shifted = np.pad(values[:, i:], ((0, 0), (0, i)), constant_values=np.nan)
    ahead = shifted[found.is_text]
    is_inside = ~np.isnan(ahead)
    before = reached[is_inside].mean() if is_inside.any() else 0.0
    reached = reached * np.nan_to_num(ahead)
    after = reached[is_inside].mean() if is_inside.any() else 0.0
    rates.append(float(after / before) if before > 0 else 0.0)
  return rates
