"""What gin binds to distil a drafter: see `gin_configs/runs/distill.gin`."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax.numpy as jnp

from specdec_jax.checkpoints import loading
from specdec_jax.data import token_files
from specdec_jax.models.t5 import T5Config
from specdec_jax.training import distillation
from specdec_jax.training.datasets import Dataset
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
    raise ValueError(f'{name} is no T5')
  return config, params
