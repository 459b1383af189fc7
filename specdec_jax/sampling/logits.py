"""Standardised sampling: every way of sampling becomes one distribution
(Leviathan et al., Sec. 2.2).

One function, which target and drafter share, folds temperature, all limits and
the vocabulary's padding into the probabilities. Tokens are then drawn from the
very array that verification reads.
"""

import math
import numbers
from collections.abc import Callable

import jax
import jax.numpy as jnp

from specdec_jax import arrays
from specdec_jax.base import Array, LogitsToProbsFn, Sampling

# Dividing logits by much less would overflow float32.
MIN_TEMPERATURE = 1e-6
# The order of float32 from -inf to inf, as integers; see `_keep_heaviest`.
_ENDS = -0x7F800001, 0x7F800000


def standardize(
  *,
  temperature: float = 1.0,
  top_k: int | None = None,
  top_p: float | None = None,
  min_p: float | None = None,
  typical_p: float | None = None,
  vocab_size: int | None = None,
) -> LogitsToProbsFn:
  """Builds the usual chain, in the usual order: padding, temperature, top-k,
  top-p, min-p, typical-p.

  Args:
    temperature: what logits are divided by; 0 is greedy decoding.
    top_k: tokens that `keep_top_k` keeps; None, here and below, keeps all.
    top_p: mass that `keep_top_p` keeps, above 0 to 1.
    min_p: least share of the largest probability, 0 to 1; see `keep_min_p`.
    typical_p: mass that `keep_typical_p` keeps, above 0 to 1.
    vocab_size: ids at or beyond it are padding, of probability zero.

  Returns:
    A function from logits `[..., V]` to float32 probabilities; given rows `[B,
    ..., V]` and their `Sampling` as well, it takes the values of that.

  Raises:
    ValueError: if a value is out of its range.
  """
  _check(temperature, top_k, top_p, min_p, typical_p)
  rule_out = mask_padding(2**31 - 1 if vocab_size is None else vocab_size)

  def logits_to_probs(logits: Array, sampling: Sampling | None = None) -> Array:
    logits = rule_out(logits.astype(jnp.float32))
    if sampling is not None:
      return _of_rows(logits, sampling)
    if temperature == 0:  # Whatever else is kept, the best is.
      return one_hot_of_best(logits)
    logits = logits / temperature
    if top_k is not None:
      logits = keep_top_k(logits, min(top_k, logits.shape[-1]))
    if top_p is not None:
      logits = keep_top_p(logits, top_p)
    if min_p is not None:
      logits = keep_min_p(logits, min_p)
    if typical_p is not None:
      logits = keep_typical_p(logits, typical_p)
    return jax.nn.softmax(logits)

  return logits_to_probs


def _of_rows(logits: Array, rows: Sampling) -> Array:
  """Computes probabilities of float32 logits `[B, ..., V]` with settings by
  row. A limit that no row uses is skipped, and no row depends on the settings
  of others."""
  column = lambda x: jnp.reshape(x, (-1,) + (1,) * (logits.ndim - 1))
  is_greedy = column(rows.temperature) == 0
  scaled = logits / jnp.where(is_greedy, 1.0, column(rows.temperature))
  for keep, value, is_used in (
    (keep_top_k, rows.top_k, rows.top_k < logits.shape[-1]),
    (keep_top_p, rows.top_p, rows.top_p < 1),
    (keep_min_p, rows.min_p, rows.min_p > 0),
    (keep_typical_p, rows.typical_p, rows.typical_p < 1),
  ):
    same = lambda logits, value: logits
    scaled = jax.lax.cond(jnp.any(is_used), keep, same, scaled, column(value))
  return jnp.where(is_greedy, one_hot_of_best(logits), jax.nn.softmax(scaled))


def keep_top_k(logits: Array, k: int | Array) -> Array:
  """Keeps the k largest logits `[..., V]`, and all ties with the k-th."""
  return _keep_heaviest(logits, logits, jnp.ones_like(logits, jnp.int32), k)


def keep_top_p(logits: Array, p: float | Array) -> Array:
  """Keeps the smallest set of likeliest tokens whose probabilities sum to at
  least `p`, of logits `[..., V]`; 1 keeps all.

  Nucleus sampling (Holtzman et al., arXiv 1904.09751). The likeliest token is
  always kept; tokens tied with the last one kept are kept too.
  """
  return _keep_heaviest(logits, logits, jax.nn.softmax(logits), _mass(p))


def keep_typical_p(logits: Array, p: float | Array) -> Array:
  """Keeps the tokens whose surprise, -log p(x), is nearest to the entropy: the
  fewest whose probabilities sum to at least `p`; 1 keeps all.

  Locally typical sampling (Meister et al., arXiv 2202.00666); ties are kept.
  """
  surprise = -jax.nn.log_softmax(logits)
  probs = jnp.exp(-surprise)
  terms = jnp.where(probs == 0, 0.0, probs * surprise)
  entropy = jnp.sum(terms, axis=-1, keepdims=True)
  return _keep_heaviest(logits, -jnp.abs(surprise - entropy), probs, _mass(p))


def _mass(p: float | Array) -> Array:
  """Makes a limit for `_keep_heaviest`, infinite if p is 1 and all is kept."""
  # Rounded sums of all probabilities may stay below 1 or reach it early; a p
  # that rounds to 0 would keep nothing.
  p = jnp.maximum(jnp.asarray(p, jnp.float32), jnp.finfo(jnp.float32).tiny)
  return jnp.where(p < 1, p, jnp.inf)


def keep_min_p(logits: Array, p: float | Array) -> Array:
  """Keeps the tokens with at least `p` times the likeliest's probability.

  Min-p sampling (Nguyen et al., arXiv 2407.01082). The likeliest token is
  always kept. Ruling out other tokens does not change ratios to its
  probability, so min-p keeps the same tokens before top-k as after it.
  """
  largest = jnp.max(logits, axis=-1, keepdims=True)
  least = largest + jnp.log(jnp.asarray(p, jnp.float32))
  return jnp.where(logits < least, -jnp.inf, logits)


def _keep_heaviest(
  logits: Array, scores: Array, weights: Array, limit: int | Array
) -> Array:
  """Rules out a token if the `weights` of all tokens with larger `scores`, all
  `[..., V]`, sum to `limit` or more.

  Finds the least kept score by bisection in 32 sums over V: sorting V logits
  takes ten times as long on a CPU. With weights 1 and limit 2, scores [3, 1, 2]
  have 0, 2, 1 above them: 3 and 2 are kept.
  """
  # Read as integers, bits of positive floats are in order: 1.0 is 0x3F800000,
  # 2.0 0x40000000. Those of negative ones are reversed, and are flipped: -1.0
  # is 0xBF800000 and becomes -0x3F800001.
  float_at = lambda i: jax.lax.bitcast_convert_type(
    jnp.where(i < 0, i ^ 0x7FFFFFFF, i), jnp.float32
  )

  def halve(_: Array, ends: tuple[Array, Array]) -> tuple[Array, Array]:
    low, high = ends
    # (low + high) // 2, whose sum could overflow 32 bits.
    middle = (low >> 1) + (high >> 1) + (low & high & 1)
    above = jnp.where(scores > float_at(middle), weights, 0)
    total = jnp.sum(above, axis=-1, keepdims=True, dtype=weights.dtype)
    is_kept = total < limit  # so the least kept score is at most `middle`
    low = jnp.where(is_kept, low, middle + 1)
    return low, jnp.where(is_kept, middle, high)

  low, high = (jnp.full_like(logits[..., :1], x, jnp.int32) for x in _ENDS)
  _, least = jax.lax.fori_loop(0, 32, halve, (low, high))
  return jnp.where(scores < float_at(least), -jnp.inf, logits)


def mask_padding(vocab_size: int) -> Callable[[Array], Array]:
  """Makes a function of logits `[..., V]` that rules out ids from `vocab_size`
  on, which only pad the embeddings. Raises ValueError for one below 1."""
  if vocab_size < 1:
    raise ValueError(f'vocab_size must be at least 1, got {vocab_size}')

  def apply(logits: Array) -> Array:
    if vocab_size >= logits.shape[-1]:
      return logits
    ids = jax.lax.broadcasted_iota(jnp.int32, logits.shape, logits.ndim - 1)
    return jnp.where(ids < vocab_size, logits, -jnp.inf)

  return apply


def one_hot_of_best(logits: Array) -> Array:
  """Computes the softmax at temperature 0, float32: 1 at the first maximum of
  logits `[..., V]`, 0 elsewhere."""
  best = arrays.argmax(logits)[..., None]
  ids = jax.lax.broadcasted_iota(jnp.int32, logits.shape, logits.ndim - 1)
  return (ids == best).astype(jnp.float32)


def _check(
  temperature: float,
  top_k: int | None,
  top_p: float | None,
  min_p: float | None,
  typical_p: float | None,
) -> None:
  if temperature and not MIN_TEMPERATURE <= temperature < math.inf:
    raise ValueError(
      f'temperature must be finite and at least {MIN_TEMPERATURE:g}, or 0, '
      f'which is greedy: got {temperature}'
    )
  is_count = top_k is None or isinstance(top_k, numbers.Integral)
  if not is_count or (top_k is not None and top_k < 1):
    raise ValueError(
      'top_k must be an integer of at least 1, or None, which keeps all: got '
      f'{top_k}'
    )
  for name, share in (('top_p', top_p), ('typical_p', typical_p)):
    if share is not None and not 0 < share <= 1:
      raise ValueError(
        f'{name} must lie in (0, 1], where 1 keeps all: got {share}'
      )
  if min_p is not None and not 0 <= min_p <= 1:
    raise ValueError(f'min_p must lie in [0, 1], got {min_p}')
