"""What training minimises: cross entropy, and divergences for distillation.

All losses are sums over target tokens, together with the weight that they are
to be divided by. Sums of parts add up: over microbatches, devices and batches.
"""

import jax
import jax.numpy as jnp
import numpy as np

from specdec_jax import base
from specdec_jax.base import Array


@base.value
class LossSums:
  """Sums over the target tokens of a batch, float32 scalars.

  Attributes:
    loss: what is minimised.
    nats: negative log-likelihood of the targets, without any regulariser.
    num_correct: targets that were the likeliest token.
    weight: the targets' weights; the number of targets where weights are 0 or
      1.
  """

  loss: Array
  nats: Array
  num_correct: Array
  weight: Array


def cross_entropy(
  logits: Array,
  targets: Array,
  weights: Array,
  *,
  label_smoothing: float = 0.0,
  z_loss: float = 0.0,
) -> LossSums:
  """T5X's loss (`t5x.losses.compute_weighted_cross_entropy`).

  The smoothed law has `1 - label_smoothing` on the target and the rest spread
  evenly over the other V - 1 tokens; its own entropy is subtracted, so that a
  perfect prediction has loss 0. The z-loss is `z_loss * log(Z)^2`.

  Args:
    logits: `[..., V]`.
    targets: int32 `[...]`.
    weights: float32 `[...]`, 0 where there is no target.
    label_smoothing: 0 to 1.
    z_loss: coefficient; T5X's own configurations take 1e-4.
  """
  logits = logits.astype(jnp.float32)
  log_z = jax.nn.logsumexp(logits, axis=-1)
  target_logits = jnp.take_along_axis(logits, targets[..., None], axis=-1)
  nats = log_z - target_logits[..., 0]
  loss = nats
  if label_smoothing:
    others = logits.shape[-1] - 1
    on, off = 1.0 - label_smoothing, label_smoothing / others
    # The weights of all tokens sum to 1, so log_z needs no factor.
    rest = logits.sum(-1) - target_logits[..., 0]
    entropy = -(on * np.log(on) + others * off * np.log(off + 1e-20))
    loss = log_z - on * target_logits[..., 0] - off * rest - entropy
  if z_loss:
    loss = loss + z_loss * jnp.square(log_z)
  is_correct = (logits.argmax(-1) == targets).astype(jnp.float32)
  return LossSums(
    loss=(loss * weights).sum(),
    nats=(nats * weights).sum(),
    num_correct=(is_correct * weights).sum(),
    weight=weights.sum(),
  )
