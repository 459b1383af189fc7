"""What gin binds to train drafters that learn from a target: see
`gin_configs/runs/train_spec_drafter.gin` and `train_block_heads.gin`."""

from typing import Any

import jax.numpy as jnp

from specdec_jax.base import Array
from specdec_jax.cli.train_distilled import read_t5
from specdec_jax.models import block_heads
from specdec_jax.models.block_decoder import BlockDecoderConfig
from specdec_jax.models.block_heads import BlockHeadsConfig
from specdec_jax.training import block_heads as block_heads_training
from specdec_jax.training import glancing
from specdec_jax.training.train_step import LossFn


def spec_drafter_params(
  config: BlockDecoderConfig, rng_key: Array, *, target: str | None = None
) -> Any:
  """Where a Spec-Drafter begins.

  Args:
    config: its sizes.
    rng_key: for what is drawn.
    target: the model whose encoder and embeddings it takes over; None draws
      everything.

  Raises:
    ValueError: if the target is no T5, or its sizes are others.
  """
  params = None if target is None else read_t5(target, jnp.float32)[1]
  return glancing.init_params(config, rng_key, params)


def block_heads_config(
  *, target: str, gamma: int, mlp_dim: int
) -> BlockHeadsConfig:
  """Sizes of heads that fit a target."""
  embed_dim = read_t5(target, jnp.float32)[0].embed_dim
  return BlockHeadsConfig(embed_dim=embed_dim, gamma=gamma, mlp_dim=mlp_dim)


def block_heads_params(config: BlockHeadsConfig, rng_key: Array) -> Any:
  """Where heads begin: all drawn."""
  return block_heads.init_params(config, rng_key)


def block_heads_loss(
  config: BlockHeadsConfig, *, target: str, label_smoothing: float = 0.0
) -> LossFn:
  """`training.block_heads.heads_loss` of a target that is read here."""
  target_config, target_params = read_t5(target, config.dtype)
  return block_heads_training.heads_loss(
    config,
    target_config=target_config,
    target_params=target_params,
    label_smoothing=label_smoothing,
  )
