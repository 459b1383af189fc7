"""T5 in miniature: random weights whose distributions are worth
sampling from."""

import jax
import jax.numpy as jnp
import numpy as np

from specdec_jax.base import LanguageModel
from specdec_jax.models import families
from specdec_jax.models.t5 import T5Config


def config(vocab_size: int, *, num_layers: int = 1, **sizes) -> T5Config:
  """Two heads, and buckets small enough for short texts to use them all."""
  defaults = {
    'embed_dim': 8,
    'num_encoder_layers': num_layers,
    'num_decoder_layers': num_layers,
    'num_heads': 2,
    'head_dim': 4,
    'mlp_dim': 12,
    'relpos_num_buckets': 8,
    'relpos_max_distance': 8,
  }
  return T5Config(vocab_size=vocab_size, **(defaults | sizes))


def params(config: T5Config, *, seed: int, scale: float = 2.0):
  """Random weights, the last projection scaled to peaked distributions."""
  rng = np.random.default_rng(seed)

  def draw(path, leaf):
    name = jax.tree_util.keystr(path)
    if name.endswith("['scale']"):
      return jnp.ones(leaf.shape, leaf.dtype)
    is_table = 'embedding' in name
    fan_in = 1 if is_table else leaf.shape[0]
    values = rng.normal(size=leaf.shape) / np.sqrt(fan_in)
    if 'logits' in name or (config.is_tied and 'token_embedder' in name):
      values = scale * values
    return jnp.asarray(values, leaf.dtype)

  return jax.tree_util.tree_map_with_path(draw, families.param_shapes(config))


def model(vocab_size: int, **sizes) -> LanguageModel:
  """The language model; its params are `params`."""
  return families.language_model(config(vocab_size, **sizes))
