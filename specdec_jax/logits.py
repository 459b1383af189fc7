"""Standardised sampling: every way of sampling as one distribution (Leviathan
et al., Sec. 2.2).

Temperature, all limits, and the vocabulary's padding are folded into the
probabilities once, by one function that target and drafter share. Whatever
is then drawn is drawn from the very array that verification reads.
"""

import math
import numbers
from collections.abc import Callable

import jax
import jax.numpy as jnp

from specdec_jax import arrays
from specdec_jax.base import Array, LogitsToProbsFn, Sampling

# Logits divided by much less would overflow float32.
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
  """The usual chain, in the usual order: padding, temperature, top-k, top-p,
  min-p, typical-p.

  The function that is returned takes logits `[..., V]`; those of rows, `[B,
  ..., V]`, with a `Sampling` after them, whose values then count. Temperature 0
  is greedy decoding; None keeps all. Ids at or beyond `vocab_size` get
  probability zero. ValueError if a value is out of its range.
  """
  _check(temperature, top_k, top_p, min_p, typical_p)
  rule_out = lambda logits: logits
  if vocab_size is not None:
    rule_out = mask_padding(vocab_size)

  def logits_to_probs(logits: Array, sampling: Sampling | None = None) -> Array:
    logits = rule_out(logits.astype(jnp.float32))
    if sampling is not None:
      return _of_rows(logits, sampling)
    if temperature == 0:  # Whatever else is kept, the best is.
      return one_hot_of_best(logits)
    logits = logits / temperature
    if top_k is not None:
      logits = keep_top_k(logits, top_k)
    if top_p is not None:
      logits = keep_top_p(logits, top_p)
    if min_p is not None:
      logits = keep_min_p(logits, min_p)
    if typical_p is not None:
      logits = keep_typical_p(logits, typical_p)
    return jax.nn.softmax(logits)

  return logits_to_probs


def _of_rows(logits: Array, rows: Sampling) -> Array:
  """Probabilities of float32 logits `[B, ..., V]`, each row's in its own way.

  What no row asks for takes no time; what others ask for does not change a row.
  """
  column = lambda x: jnp.reshape(x, (-1,) + (1,) * (logits.ndim - 1))
  is_greedy = column(rows.temperature) == 0
  kept = logits / jnp.where(is_greedy, 1.0, column(rows.temperature))
  for keep, value, is_used in (
    (keep_top_k, rows.top_k, rows.top_k < logits.shape[-1]),
    (keep_top_p, rows.top_p, rows.top_p < 1),
    (keep_min_p, rows.min_p, rows.min_p > 0),
    (keep_typical_p, rows.typical_p, rows.typical_p < 1),
  ):
    same = lambda logits, value: logits
    kept = jax.lax.cond(jnp.any(is_used), keep, same, kept, column(value))
  return jnp.where(is_greedy, one_hot_of_best(logits), jax.nn.softmax(kept))


def keep_top_k(logits: Array, k: int | Array) -> Array:
  """Keeps the k largest logits; ties with the k-th are all kept."""
  return _keep_heaviest(logits, logits, jnp.ones_like(logits, jnp.int32), k)


def keep_top_p(logits: Array, p: float | Array) -> Array:
  """Keeps the smallest set of likeliest tokens with at least `p` of the mass;
  1 keeps all.

  Nucleus sampling (Holtzman et al., arXiv 1904.09751). The likeliest token is
  always kept, and so are ties with the least likely one that is.
  """
  return _keep_heaviest(logits, logits, jax.nn.softmax(logits), _mass(p))


def keep_typical_p(logits: Array, p: float | Array) -> Array:
  """Keeps the smallest set with at least `p` of the mass of the tokens whose
  surprise is nearest to its mean, the entropy; 1 keeps all.

  Locally typical sampling (Meister et al., arXiv 2202.00666); ties are kept.
  """
  surprise = -jax.nn.log_softmax(logits)
  probs = jnp.exp(-surprise)
  terms = jnp.where(probs == 0, 0.0, probs * surprise)
  entropy = jnp.sum(terms, axis=-1, keepdims=True)
  return _keep_heaviest(logits, -jnp.abs(surprise - entropy), probs, _mass(p))


def _mass(p: float | Array) -> Array:
  """A limit of `_keep_heaviest`, infinite if all is to be kept."""
  # The mass of all may be rounded to less than 1, or reach it too early.
  p = jnp.asarray(p, jnp.float32)
  return jnp.where(p < 1, p, jnp.inf)


def keep_min_p(logits: Array, p: float | Array) -> Array:
  """Keeps the tokens with at least `p` times the likeliest's probability.

  Min-p sampling (Nguyen et al., arXiv 2407.01082). The likeliest token is
  always kept. The ratio to its probability does not change when other tokens
  are ruled out, so min-p keeps the same tokens before top-k as after it.
  """
  largest = jnp.max(logits, axis=-1, keepdims=True)
  least = largest + jnp.log(jnp.asarray(p, jnp.float32))
  return jnp.where(logits < least, -jnp.inf, logits)


def _keep_heaviest(
  logits: Array, scores: Array, weights: Array, limit: int | Array
) -> Array:
  """Rules out each token if the `weights` of those with larger `scores`, all
  `[..., V]`, sum to `limit` or more.

  The least score that is kept is found by bisection, 32 sums over V: to sort V
  logits takes ten times as long on a CPU.
  """
  # Bits of floats that are read as integers are in their order, but for
  # negative ones, in which it is turned round: 1.0 is 0x3F800000 and 2.0
  # 0x40000000; -1.0 is 0xBF800000 and becomes -0x3F800001.
  float_at = lambda i: jax.lax.bitcast_convert_type(
    jnp.where(i < 0, i ^ 0x7FFFFFFF, i), jnp.float32
  )

  def halve(_: Array, ends: tuple[Array, Array]) -> tuple[Array, Array]:
    low, high = ends
    # (low + high) // 2, which 32 bits do not hold.
    middle = (low >> 1) + (high >> 1) + (low & high & 1)
    above = jnp.where(scores > float_at(middle), weights, 0)
    total = jnp.sum(above, axis=-1, keepdims=True, dtype=weights.dtype)
    is_kept = total < limit
    low = jnp.where(is_kept, low, middle + 1)
    return low, jnp.where(is_kept, middle, high)

  low, high = (jnp.full_like(logits[..., :1], x, jnp.int32) for x in _ENDS)
  _, least = jax.lax.fori_loop(0, 32, halve, (low, high))
  return jnp.where(scores < float_at(least), -jnp.inf, logits)


def mask_padding(vocab_size: int) -> Callable[[Array], Array]:
  """Rules out ids at or beyond `vocab_size`, which only pad the embeddings."""
  if vocab_size < 1:
    raise ValueError(f'vocab_size must be at least 1, got {vocab_size}')

  def apply(logits: Array) -> Array:
    if vocab_size >= logits.shape[-1]:
      return logits
    ids = jax.lax.broadcasted_iota(jnp.int32, logits.shape, logits.ndim - 1)
    return jnp.where(ids < vocab_size, logits, -jnp.inf)

  return apply


def one_hot_of_best(logits: Array) -> Array:
  """The softmax at temperature 0: 1 at the first maximum of logits `[..., V]`,
  0 elsewhere, float32."""
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
    raise ValueError(f'top_k must be an integer of at least 1, got {top_k}')
  for name, share in (('top_p', top_p), ('typical_p', typical_p)):
    if share is not None and not 0 < share <= 1:
      raise ValueError(f'{name} must lie in (0, 1], got {share}')
  if min_p is not None and not 0 <= min_p <= 1:
    raise ValueError(f'min_p must lie in [0, 1], got {min_p}')
