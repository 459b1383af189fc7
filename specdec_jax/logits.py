"""Standardised sampling: every way of sampling as one distribution (Leviathan
et al., Sec. 2.2).

Temperature, top-k, top-p and the vocabulary's padding are folded into the
probabilities once, by one function that target and drafter share. Whatever is
then drawn is drawn from the very array that verification reads.
"""

import math
import numbers
from collections.abc import Callable

import jax
import jax.numpy as jnp

from specdec_jax import arrays
from specdec_jax.base import Array, LogitsToProbsFn

LogitsTransform = Callable[[Array], Array]

# Logits divided by much less would overflow float32.
MIN_TEMPERATURE = 1e-6


def scale_by_temperature(temperature: float) -> LogitsTransform:
  """Divides logits by `temperature`; 0, greedy decoding, is `standardize`'s.

  Raises:
    ValueError: if `temperature` is not finite or below `MIN_TEMPERATURE`.
  """
  if not MIN_TEMPERATURE <= temperature < float('inf'):
    raise ValueError(
      f'temperature must be finite and at least {MIN_TEMPERATURE:g}, since '
      'logits divided by less overflow, or 0, which is greedy and for '
      f'standardize: got {temperature}'
    )
  return lambda logits: logits / temperature


def keep_top_k(k: int) -> LogitsTransform:
  """Keeps the k largest logits; ties with the k-th are all kept.

  Raises:
    ValueError: if `k` is no integer, or less than 1.
  """
  if not isinstance(k, numbers.Integral) or k < 1:
    raise ValueError(f'top_k must be an integer of at least 1, got {k}')

  def apply(logits: Array) -> Array:
    if k >= logits.shape[-1]:
      return logits
    smallest_kept = jax.lax.top_k(logits, k)[0][..., -1:]
    return jnp.where(logits < smallest_kept, -jnp.inf, logits)

  return apply


def keep_top_p(p: float) -> LogitsTransform:
  """Keeps the smallest set of likeliest tokens with at least `p` of the mass.

  Nucleus sampling (Holtzman et al., arXiv 1904.09751). The likeliest token is
  always kept, and so are ties with the least likely one that is.

  Raises:
    ValueError: if `p` is outside (0, 1].
  """
  if not 0 < p <= 1:
    raise ValueError(f'top_p must lie in (0, 1], got {p}')

  def apply(logits: Array) -> Array:
    if p == 1:
      return logits
    descending = -jnp.sort(-logits, axis=-1)
    probs = jax.nn.softmax(descending, axis=-1)
    is_kept = jnp.cumsum(probs, axis=-1) - probs < p  # The mass before it.
    smallest_kept = jnp.min(
      jnp.where(is_kept, descending, jnp.inf), axis=-1, keepdims=True
    )
    return jnp.where(logits < smallest_kept, -jnp.inf, logits)

  return apply


def keep_min_p(p: float) -> LogitsTransform:
  """Keeps the tokens with at least `p` times the likeliest's probability.

  Min-p sampling (Nguyen et al., arXiv 2407.01082). The likeliest token is
  always kept. The ratio to its probability does not change when other tokens
  are ruled out, so min-p keeps the same tokens before top-k as after it.

  Raises:
    ValueError: if `p` is outside [0, 1].
  """
  if not 0 <= p <= 1:
    raise ValueError(f'min_p must lie in [0, 1], got {p}')

  def apply(logits: Array) -> Array:
    if p == 0:
      return logits
    largest = jnp.max(logits, axis=-1, keepdims=True)
    return jnp.where(logits < largest + math.log(p), -jnp.inf, logits)

  return apply


def mask_padding(vocab_size: int) -> LogitsTransform:
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


def chain(
  *transforms: LogitsTransform, normalise: LogitsTransform = jax.nn.softmax
) -> LogitsToProbsFn:
  """From logits `[..., V]` to float32 probabilities: the transforms, then
  `normalise`."""

  def logits_to_probs(logits: Array) -> Array:
    logits = logits.astype(jnp.float32)
    for transform in transforms:
      logits = transform(logits)
    return normalise(logits)

  return logits_to_probs


def standardize(
  *,
  temperature: float = 1.0,
  top_k: int | None = None,
  top_p: float | None = None,
  min_p: float | None = None,
  vocab_size: int | None = None,
) -> LogitsToProbsFn:
  """The usual chain, in the usual order: padding, temperature, top-k, top-p,
  min-p.

  Args:
    temperature: 0, which is greedy decoding, or at least `MIN_TEMPERATURE`.
    top_k: None keeps all.
    top_p: None keeps all.
    min_p: None keeps all.
    vocab_size: ids at or beyond it get probability zero; None: there are none.

  Raises:
    ValueError: if a value is out of its range.
  """
  transforms = [
    None if vocab_size is None else mask_padding(vocab_size),
    scale_by_temperature(temperature or 1.0),
    None if top_k is None else keep_top_k(top_k),
    None if top_p is None else keep_top_p(top_p),
    None if min_p is None else keep_min_p(min_p),
  ]
  if temperature == 0:  # Whatever else is kept, the best is.
    return chain(*filter(None, transforms[:1]), normalise=one_hot_of_best)
  return chain(*filter(None, transforms))
