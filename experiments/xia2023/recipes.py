"""What gin binds to train a Spec-Drafter, or the heads of blockwise parallel
decoding; see `gin/`."""

import jax
import jax.numpy as jnp

from experiments.xia2023 import glancing
from specdec_jax.base import Array
from specdec_jax.contrib.block_heads import network as block_heads
from specdec_jax.contrib.block_heads.network import BlockHeads, BlockHeadsConfig
from specdec_jax.models.drafting.block_decoder import BlockDecoderConfig
from specdec_jax.models.layers import applied
from specdec_jax.models.t5 import T5
from specdec_jax.training import losses
from specdec_jax.training.losses import ArrayTree, Batch, LossFn, LossSums
from specdec_jax.training.recipes import read_t5


def spec_drafter_params(
  config: BlockDecoderConfig, rng_key: Array, *, target: str | None = None
) -> ArrayTree:
  """Makes the parameters that a Spec-Drafter's training starts from: the
  encoder and the embeddings of `target`, if there is one, and the rest
  fresh."""
  params = None if target is None else read_t5(target, jnp.float32)[1]
  return glancing.init_params(config, rng_key, params)


def block_heads_config(
  *, target: str, gamma: int, mlp_dim: int
) -> BlockHeadsConfig:
  """Chooses the sizes of heads for a target."""
  embed_dim = read_t5(target, jnp.float32)[0].embed_dim
  return BlockHeadsConfig(embed_dim=embed_dim, gamma=gamma, mlp_dim=mlp_dim)


def block_heads_params(config: BlockHeadsConfig, rng_key: Array) -> ArrayTree:
  """Draws the parameters of heads."""
  return block_heads.init_params(config, rng_key)


def block_heads_loss(
  config: BlockHeadsConfig, *, target: str, label_smoothing: float = 0.0
) -> LossFn:
  """Makes a loss: the cross entropy of one head's guesses at all positions of a
  batch.

  Head g, counted from 1, guesses the token g further than the target does.
  A step trains one head, drawn at random, and the target is frozen, so that its
  own decoding stays what it was (Stern et al., arXiv 1811.03115). Batches may
  be packed; a guess beyond the end of its example does not count. Without a
  key, as in validation, it is the first head.

  `target` is a model, as `--model` takes it. The config's dropout rate is
  ignored, since the target's states are those of decoding.
  """
  target_config, target_params = read_t5(target, config.dtype)

  def loss_fn(params, batch: Batch, key: Array | None) -> LossSums:
    index = jnp.zeros((), jnp.int32)
    if key is not None:
      index = jax.random.randint(key, (), 0, config.gamma, jnp.int32)
    hidden = losses.teacher_forced(
      target_config, target_params, batch, method=T5.hidden
    )
    params = jax.tree.map(lambda x: x.astype(config.dtype), params)
    ahead = applied(BlockHeads(config))(
      params, hidden, index, method=BlockHeads.one
    )
    logits = applied(T5(target_config))(target_params, ahead, method=T5.project)
    targets, weights = shift(batch, index + 1, config.gamma)
    return losses.cross_entropy(
      logits, targets, weights, label_smoothing=label_smoothing
    )

  return loss_fn


def shift(
  batch: Batch, distance: Array, max_distance: int
) -> tuple[Array, Array]:
  """Reads targets and weights `[B, T]` of what stands `distance` positions
  further on in the same example."""

  def further(x: Array) -> Array:
    padded = jnp.pad(x, ((0, 0), (0, max_distance)))
    return jax.lax.dynamic_slice_in_dim(padded, distance, x.shape[1], axis=1)

  # Tokens [5, 6, 1, 7, 1] of segments [1, 1, 1, 2, 2], one further on, are
  # [6, 1, 7, 1, 0] with weights [1, 1, 0, 1, 0].
  segments = batch['decoder_segment_ids']
  is_same = segments == further(segments)
  weights = jnp.where(is_same, further(batch['decoder_loss_weights']), 0.0)
  return further(batch['decoder_target_tokens']), weights
