"""Losses: cross entropy, and divergences for distillation.

Losses are sums over target tokens, with the weight by which to divide them, so
that they add up over microbatches, devices and batches.
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from specdec_jax import arrays, base
from specdec_jax.base import Array
from specdec_jax.models.layers import applied
from specdec_jax.models.t5 import T5, T5Config


@base.value
class LossSums:
  """Sums over the target tokens of a batch, float32 scalars."""

  loss: Array  # The loss to minimise.
  nats: Array  # Negative log-likelihood, without any regulariser.
  num_correct: Array  # Targets that were the likeliest token.
  weight: Array  # Their number, where weights are 0 or 1.
  # Further sums by name, each with the weight it is to be divided by: `[2]`.
  figures: Mapping[str, Array] = dataclasses.field(default_factory=dict)

  def means(self) -> dict[str, Array]:
    """Divides the further figures by their weights."""
    return {
      name: pair[0] / jnp.maximum(pair[1], 1.0)
      for name, pair in self.figures.items()
    }


Batch = Mapping[str, Array]
# Arrays by module and name, such as parameters or their gradients.
ArrayTree = Any
# `(params, batch, dropout_key) -> LossSums`; no key means no dropout.
LossFn = Callable[[ArrayTree, Batch, Array | None], LossSums]


def cross_entropy(
  logits: Array,
  targets: Array,
  weights: Array,
  *,
  label_smoothing: float = 0.0,
  z_loss: float = 0.0,
) -> LossSums:
  """Computes T5X's loss (`t5x.losses.compute_weighted_cross_entropy`).

  The smoothed distribution has `1 - label_smoothing` on the target and the rest
  spread evenly over the other V - 1 tokens; a perfect prediction has loss 0.
  The z-loss is `z_loss * log(Z)^2`.

  Logits are `[..., V]`, targets int32 `[...]`, weights float32 `[...]` and 0
  where there is no target. T5X's own configurations take a z_loss of 1e-4.
  """
  logits = logits.astype(jnp.float32)
  # -log p of the target is log Z minus its logit.
  log_z = jax.nn.logsumexp(logits, axis=-1)
  target_logits = jnp.take_along_axis(logits, targets[..., None], axis=-1)
  nats = log_z - target_logits[..., 0]
  loss = nats
  if label_smoothing:
    num_others = logits.shape[-1] - 1
    on, off = 1.0 - label_smoothing, label_smoothing / num_others
    # The weights of all tokens sum to 1, so log_z needs no factor.
    rest = logits.sum(-1) - target_logits[..., 0]
    # A perfect prediction has the entropy of the smoothed distribution.
    entropy = -(on * np.log(on) + num_others * off * np.log(off + 1e-20))
    loss = log_z - on * target_logits[..., 0] - off * rest - entropy
  if z_loss:
    loss = loss + z_loss * jnp.square(log_z)
  is_correct = (arrays.argmax(logits) == targets).astype(jnp.float32)
  return LossSums(
    loss=(loss * weights).sum(),
    nats=(nats * weights).sum(),
    num_correct=(is_correct * weights).sum(),
    weight=weights.sum(),
  )


def check_share(name: str, value: float) -> None:
  """Raises ValueError unless a value is at least 0 and less than 1."""
  if not 0 <= value < 1:
    raise ValueError(f'{name} must be at least 0 and less than 1, got {value}')


def teacher_forced(
  config: T5Config,
  params: ArrayTree,
  batch: Batch,
  dropout_key: Array | None = None,
  **options: Any,
) -> Array:
  """Computes logits, float32 `[B, T, V]`, for a batch of
  `training.data.training_batches`, with or without features of an encoder.

  The float32 parameters are rounded to the config's dtype, that of the
  activations. `options` may name another `method` than the logits.
  """
  params = jax.tree.map(lambda x: x.astype(config.dtype), params)
  return applied(T5(config))(
    params,
    batch.get('encoder_input_tokens'),
    batch['decoder_input_tokens'],
    encoder_segment_ids=batch.get('encoder_segment_ids'),
    decoder_segment_ids=batch['decoder_segment_ids'],
    rngs=None if dropout_key is None else {'dropout': dropout_key},
    **options,
  )


def supervised_loss(
  config: T5Config, *, label_smoothing: float = 0.0, z_loss: float = 1e-4
) -> LossFn:
  """Makes a loss: the `cross_entropy` of the batch's targets. ValueError if the
  config is no T5's, or a number is out of range."""
  if not isinstance(config, T5Config):
    raise ValueError('the usual loss is for a T5: another network needs a loss')
  check_share('label_smoothing', label_smoothing)
  if not 0 <= z_loss < float('inf'):
    raise ValueError(f'z_loss must be a number of at least 0, got {z_loss}')

  def loss_fn(params, batch: Batch, dropout_key: Array | None) -> LossSums:
    key = dropout_key if config.dropout_rate else None
    return cross_entropy(
      teacher_forced(config, params, batch, key),
      batch['decoder_target_tokens'],
      batch['decoder_loss_weights'],
      label_smoothing=label_smoothing,
      z_loss=z_loss,
    )

  return loss_fn


DIVERGENCES = ('forward_kl', 'reverse_kl', 'jsd', 'tvd')


def divergence(
  target_logits: Array, draft_logits: Array, *, kind: str, beta: float = 0.5
) -> Array:
  """Measures how far a drafter's distributions q are from a target's p, per
  position: DistillSpec (Zhou et al., arXiv 2310.08461, Sec. 2 and App. A).

  Both logits are `[..., V]`. Kinds are `forward_kl`, KL(p | q); `reverse_kl`,
  KL(q | p); `jsd`, `beta` KL(p | m) + (1 - `beta`) KL(q | m) with m the mixture
  of the same weights, `beta` in (0, 1); `tvd`, half of the sum of |p - q|.
  Returns float32 `[...]`, 0 where p is q; ValueError for other kinds or betas.
  """
  if kind not in DIVERGENCES:
    names = ', '.join(DIVERGENCES)
    raise ValueError(f'{kind!r} is no divergence, expected one of {names}')
  if not 0 < beta < 1:
    raise ValueError(f'beta must be between 0 and 1, got {beta}')
  log_p = jax.nn.log_softmax(target_logits.astype(jnp.float32))
  log_q = jax.nn.log_softmax(draft_logits.astype(jnp.float32))
  if kind == 'forward_kl':
    return _kl(log_p, log_q)
  if kind == 'reverse_kl':
    return _kl(log_q, log_p)
  # 1 minus the probability that speculative sampling accepts a token drawn from
  # q (Leviathan et al., arXiv 2211.17192, Def. 3.2).
  if kind == 'tvd':
    return 0.5 * jnp.abs(jnp.exp(log_p) - jnp.exp(log_q)).sum(-1)
  # The mixture's own logarithm, log(beta p + (1 - beta) q).
  log_m = jnp.logaddexp(log_p + np.log(beta), log_q + np.log1p(-beta))
  return beta * _kl(log_p, log_m) + (1 - beta) * _kl(log_q, log_m)


def _kl(log_p: Array, log_q: Array) -> Array:
  return (jnp.exp(log_p) * (log_p - log_q)).sum(-1)
