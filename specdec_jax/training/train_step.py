"""One step of training, as a pure function of the state and a batch."""

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from specdec_jax import base
from specdec_jax.base import Array
from specdec_jax.models.t5 import T5, T5Config
from specdec_jax.sharding import rules
from specdec_jax.training import losses
from specdec_jax.training.losses import LossSums

Batch = Mapping[str, Any]
# `(params, batch, dropout_key) -> LossSums`; no key means no dropout.
LossFn = Callable[[Any, Batch, Array | None], LossSums]


@base.value
class TrainState:
  """All that a step changes.

  Attributes:
    step: int32 scalar, steps taken.
    params: float32 tree.
    opt_state: the optimiser's.
  """

  step: Array
  params: Any
  opt_state: Any


def apply(
  network: Any,
  params: Any,
  dropout_key: Array | None,
  *args: Any,
  **options: Any,
) -> Any:
  """What a Linen network makes of `args`; it drops out when given a key."""
  return network.apply(
    {'params': params},
    *args,
    is_training=dropout_key is not None,
    rngs=None if dropout_key is None else {'dropout': dropout_key},
    **options,
  )


def teacher_forced(
  config: T5Config,
  params: Any,
  batch: Batch,
  dropout_key: Array | None = None,
  **options: Any,
) -> Array:
  """Logits, float32 `[B, T, V]`, for a batch of `data.training_batches`.

  Args:
    config: sizes; its dtype is that of the activations, and the float32
      parameters are rounded to it.
    params: float32 tree.
    batch: features, with or without those of an encoder.
    dropout_key: drops out when given.
    **options: such as another `method` than the logits.
  """
  params = jax.tree.map(lambda x: x.astype(config.dtype), params)
  return apply(
    T5(config),
    params,
    dropout_key,
    batch.get('encoder_input_tokens'),
    batch['decoder_input_tokens'],
    encoder_segment_ids=batch.get('encoder_segment_ids'),
    decoder_segment_ids=batch['decoder_segment_ids'],
    **options,
  )


def supervised_loss(
  config: T5Config, *, label_smoothing: float = 0.0, z_loss: float = 0.0
) -> LossFn:
  """Cross entropy of the batch's targets; see `losses.cross_entropy`."""

  def loss_fn(params, batch: Batch, dropout_key: Array | None) -> LossSums:
    key = dropout_key if config.dropout_rate else None
    return losses.cross_entropy(
      teacher_forced(config, params, batch, key),
      batch['decoder_target_tokens'],
      batch['decoder_loss_weights'],
      label_smoothing=label_smoothing,
      z_loss=z_loss,
    )

  return loss_fn


def step(
  state: TrainState,
  rng_key: Array,
  batch: Batch,
  *,
  loss_fn: LossFn,
  optimizer: Any,
  num_microbatches: int = 1,
) -> tuple[TrainState, dict[str, Array]]:
  """Minimises the mean loss of a batch's targets a little.

  Args:
    state: where training is.
    rng_key: of the whole run; the step's own key is folded in.
    batch: `[B, ...]` features.
    loss_fn: sums; their gradient is divided by the batch's whole weight.
    optimizer: an optax `GradientTransformation`.
    num_microbatches: parts of the batch that are computed one after the other,
      for less memory; the result is the same.

  Returns:
    The next state, and float32 scalars: `loss`, `nats` and `accuracy` per
    target, `weight` of the targets, `grad_norm`.
  """
  key = jax.random.fold_in(rng_key, state.step)
  grads, sums = _summed_gradients(
    loss_fn, state.params, batch, key, num_microbatches
  )
  scale = 1.0 / jnp.maximum(sums.weight, 1.0)
  grads = jax.tree.map(lambda g: g * scale, grads)
  with jax.numpy_dtype_promotion('standard'):  # optax counts on it.
    updates, opt_state = optimizer.update(grads, state.opt_state, state.params)
  params = jax.tree.map(lambda p, u: p + u, state.params, updates)
  squares = [jnp.sum(jnp.square(g)) for g in jax.tree.leaves(grads)]
  metrics = {
    'loss': sums.loss * scale,
    'nats': sums.nats * scale,
    'accuracy': sums.num_correct * scale,
    'weight': sums.weight,
    'grad_norm': jnp.sqrt(jnp.stack(squares).sum()),
  }
  state = TrainState(step=state.step + 1, params=params, opt_state=opt_state)
  return state, metrics


def _summed_gradients(
  loss_fn: LossFn, params: Any, batch: Batch, key: Array, parts: int
) -> tuple[Any, LossSums]:
  """Gradients of the sum of losses, and the sums."""

  def part_gradients(part: Batch, part_key: Array):
    def loss_of(params):
      sums = loss_fn(params, part, part_key)
      return sums.loss, sums

    return jax.grad(loss_of, has_aux=True)(params)

  if parts == 1:
    return part_gradients(batch, jax.random.fold_in(key, 0))
  size = batch['decoder_target_tokens'].shape[0]
  if parts < 1 or size % parts:
    raise ValueError(f'{size} rows do not divide into {parts} microbatches')
  # Interleaved, so that every part has some of every device's rows.
  split = jax.tree.map(
    lambda x: x.reshape(size // parts, parts, *x.shape[1:]).swapaxes(0, 1),
    dict(batch),
  )

  def body(total, part_and_index):
    part, index = part_and_index
    part = jax.tree.map(
      lambda x: rules.constrain(x, 'batch', *(None,) * (x.ndim - 1)), part
    )
    found = part_gradients(part, jax.random.fold_in(key, index))
    return jax.tree.map(jnp.add, total, found), None

  first = jax.tree.map(lambda x: x[0], split)
  shapes = jax.eval_shape(part_gradients, first, key)
  zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)
  indices = jnp.arange(parts, dtype=jnp.int32)
  return jax.lax.scan(body, zeros, (split, indices))[0]
