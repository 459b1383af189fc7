"""What gin binds to distil a drafter, or to train one that learns from a
target: see `gin_configs/runs/distill.gin`, `train_spec_drafter.gin` and
`train_block_heads.gin`."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax.numpy as jnp

from specdec_jax.base import Array
from specdec_jax.checkpoints import loading
from specdec_jax.data import token_files
from specdec_jax.data.datasets import Dataset
from specdec_jax.models import block_heads
from specdec_jax.models.block_decoder import BlockDecoderConfig
from specdec_jax.models.block_heads import BlockHeadsConfig
from specdec_jax.models.t5 import T5Config
from specdec_jax.training import block_heads as block_heads_training
from specdec_jax.training import distillation, glancing
from specdec_jax.training.train_step import LossFn


def distillation_loss(
  config: T5Config,
  *,
  target: str,
  kind: str = 'forward_kl',
  beta: float = 0.5,
  target_dtype: str | None = None,
) -> LossFn:
  """`training.distillation.distillation_loss` of a target that is read here.

  Args:
    config: of the drafter.
    target: a model, as `--model` takes it.
    kind: see `losses.divergence`.
    beta: see `losses.divergence`.
    target_dtype: of the target's weights and activations; None takes that of
      the drafter's activations.
  """
  target_config, target_params = read_t5(target, target_dtype or config.dtype)
  return distillation.distillation_loss(
    config,
    target_config=target_config,
    target_params=target_params,
    kind=kind,
    beta=beta,
  )


def drafter_texts(
  *,
  config: T5Config,
  tokens: str | Sequence[str],
  eos_id: int = 1,
  **settings: Any,
) -> Dataset:
  """`training.distillation.drafter_texts` over the training inputs of a folder
  that `specdec data prepare` wrote, or of several with one vocabulary."""
  folders = [tokens] if isinstance(tokens, str) else tokens
  files = [token_files.load(Path(f) / 'train.npz') for f in folders]
  vocabulary = token_files.load_description(folders[0])['vocabulary']
  return distillation.drafter_texts(
    config,
    token_files.concatenate(files),
    eos_id=eos_id,
    vocab_size=vocabulary['size'],
    **settings,
  )


def read_t5(name: str, dtype: Any) -> tuple[T5Config, Any]:
  """Sizes and parameters of a T5.

  Raises:
    ValueError: if it is another model.
  """
  config, params = loading.read(loading.locate(name), dtype=jnp.dtype(dtype))
  if not isinstance(config, T5Config):
    raise ValueError(f'{name} is not a T5')
  return config, params


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
    ValueError: if the target is not a T5, or its sizes differ.
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
