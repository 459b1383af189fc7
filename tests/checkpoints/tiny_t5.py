"""Tiny T5s, and what T5X wrote of one."""

import dataclasses
import json
import pathlib
import shutil

import jax
import numpy as np

from specdec_jax.checkpoints import model_file
from specdec_jax.models import families
from specdec_jax.models.t5 import T5Config
from specdec_jax.text import vocabulary_files

GOLDEN = pathlib.Path(__file__).parent.parent / 'golden'
T5X = GOLDEN / 't5x'

# What is in the checkpoints that T5X wrote.
T5X_CONFIG = T5Config(
  vocab_size=128,
  embed_dim=64,
  num_encoder_layers=2,
  num_decoder_layers=2,
  num_heads=4,
  head_dim=16,
  mlp_dim=128,
)
# What is in the checkpoint whose layers it scans.
SCANNED_CONFIG = T5Config(
  vocab_size=48,
  embed_dim=16,
  num_encoder_layers=3,
  num_decoder_layers=2,
  num_heads=2,
  head_dim=4,
  mlp_dim=24,
  has_layer_relpos=True,
)


def make_config(**changes) -> T5Config:
  config = T5Config(
    vocab_size=32,
    embed_dim=16,
    num_encoder_layers=2,
    num_decoder_layers=1,
    num_heads=2,
    head_dim=4,
    mlp_dim=24,
    relpos_num_buckets=8,
    relpos_max_distance=20,
  )
  return dataclasses.replace(config, **changes)


def make_params(config, seed: int = 0) -> dict:
  """Random parameters, different in every element."""
  rng = np.random.default_rng(seed)
  return jax.tree.map(
    lambda leaf: jax.numpy.asarray(rng.standard_normal(leaf.shape), leaf.dtype),
    families.param_shapes(config),
  )


def write_model(folder: pathlib.Path) -> pathlib.Path:
  """T5X's checkpoint in a folder with its sizes and its vocabulary."""
  shutil.copytree(T5X / 't5x_orbax' / 'checkpoint_7', folder / 'checkpoint_7')
  shutil.copy(T5X / 'tiny_sp.model', folder / vocabulary_files.SENTENCEPIECE)
  settings = json.dumps({'extra_ids': 0})
  (folder / 'tokenizer_config.json').write_text(settings)
  model_file.write(folder, T5X_CONFIG)
  return folder
