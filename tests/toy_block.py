"""The Spec-Drafter's network in miniature."""

import jax
import jax.numpy as jnp
import numpy as np

from specdec_jax.models import families
from specdec_jax.models.drafting.block_decoder import BlockDecoderConfig


def config(vocab_size: int, **sizes) -> BlockDecoderConfig:
  """Two heads, two layers a side, room for forty positions."""
  defaults = {
    'embed_dim': 8,
    'num_encoder_layers': 2,
    'num_decoder_layers': 2,
    'num_heads': 2,
    'head_dim': 4,
    'mlp_dim': 12,
    'max_positions': 40,
    'relpos_num_buckets': 8,
    'relpos_max_distance': 8,
  }
  return BlockDecoderConfig(vocab_size=vocab_size, **(defaults | sizes))


def params(config: BlockDecoderConfig, *, seed: int):
  """Random weights; norms that are not the identity, so as not to hide where
  they stand."""
  rng = np.random.default_rng(seed)

  def draw(path, leaf):
    name = jax.tree_util.keystr(path)
    values = rng.normal(size=leaf.shape)
    if name.endswith(("['scale']", "['bias']")):
      values = 0.3 * values + name.endswith("['scale']")
    elif name.endswith("['kernel']"):
      values = values / np.sqrt(leaf.shape[0])
    return jnp.asarray(values, leaf.dtype)

  shapes = families.param_shapes(config)
  return jax.tree_util.tree_map_with_path(draw, shapes)
