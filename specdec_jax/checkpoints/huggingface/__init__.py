"""Models in folders as Hugging Face lays them out, and its hub."""

from specdec_jax.checkpoints.huggingface.folder import (
  CONFIG,
  is_folder,
  read_config,
  read_params,
  save,
)
from specdec_jax.checkpoints.huggingface.hub import download
from specdec_jax.checkpoints.huggingface.vocabulary import (
  read_eos_ids,
  read_vocabulary,
)

__all__ = [
  'CONFIG',
  'download',
  'is_folder',
  'read_config',
  'read_eos_ids',
  'read_params',
  'read_vocabulary',
  'save',
]
