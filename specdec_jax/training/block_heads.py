"""How heads learn to guess further ahead (Stern et al., arXiv 1811.03115).

The target is frozen, so that its own decoding stays what it was; a step trains
one head, drawn at random, as in the paper.
"""

from typing import Any

import jax
import jax.numpy as jnp

from specdec_jax.base import Array
from specdec_jax.models.block_heads import BlockHeads, BlockHeadsConfig
from specdec_jax.models.t5 import T5, T5Config
from specdec_jax.training import losses
from specdec_jax.training.losses import LossSums
from specdec_jax.training.train_step import Batch, LossFn


def heads_loss(
  config: BlockHeadsConfig,
  *,
  target_config: T5Config,
  target_params: Any,
  label_smoothing: float = 0.0,
) -> LossFn:
  """Cross entropy of one head's guesses at all positions of a batch.

  Head g, counted from 1, guesses the token g further than the target does.
  Batches may be packed; a guess beyond the end of its example does not count.
  Without a key, as in validation, it is the first head.

  Args:
    config: of the heads; its dropout rate is ignored, since the target's states
      are those of decoding.
    target_config: of the frozen target.
    target_params: its parameters.
    label_smoothing: see `losses.cross_entropy`.
  """

  def loss_fn(params, batch: Batch, key: Array | None) -> LossSums:
    index = jnp.zeros((), jnp.int32)
    if key is not None:
      index = jax.random.randint(key, (), 0, config.gamma, jnp.int32)
    hidden: Any = T5(target_config).apply(
      {'params': target_params},
      batch.get('encoder_input_tokens'),
      batch['decoder_input_tokens'],
      encoder_segment_ids=batch.get('encoder_segment_ids'),
      decoder_segment_ids=batch['decoder_segment_ids'],
      method=T5.hidden,
    )
    params = jax.tree.map(lambda x: x.astype(config.dtype), params)
    ahead: Any = BlockHeads(config).apply(
      {'params': params}, hidden, index, method=BlockHeads.one
    )
    logits: Any = T5(target_config).apply(
      {'params': target_params}, ahead, method=T5.project
    )
    targets, weights = shift(batch, index + 1, config.gamma)
    return losses.cross_entropy(
      logits, targets, weights, label_smoothing=label_smoothing
    )

  return loss_fn


def shift(
  batch: Batch, distance: Array, max_distance: int
) -> tuple[Array, Array]:
  """Targets and weights `[B, T]` of what stands `distance` positions further
  on in the same example."""

  def further(x: Array) -> Array:
    padded = jnp.pad(x, ((0, 0), (0, max_distance)))
    return jax.lax.dynamic_slice_in_dim(padded, distance, x.shape[1], axis=1)

  segments = batch['decoder_segment_ids']
  is_same = segments == further(segments)
  weights = further(batch['decoder_loss_weights'])
  return (
    further(batch['decoder_target_tokens']),
    jnp.where(is_same, weights, 0.0),
  )
