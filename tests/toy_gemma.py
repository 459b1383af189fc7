"""Gemmas in miniature: random weights whose distributions are worth
sampling from.

Windows are shorter than the texts of the tests.
"""

import jax
import jax.numpy as jnp
import numpy as np

from specdec_jax.models import families
from specdec_jax.models.gemma.gemma4 import Gemma4Config
from specdec_jax.models.gemma.layers import GemmaConfig
from specdec_jax.models.gemma.t5gemma import T5GemmaConfig

_SIZES = {
  'embed_dim': 8,
  'num_heads': 4,
  'num_kv_heads': 2,
  'head_dim': 4,
  'mlp_dim': 12,
  'query_pre_attn_scalar': 3,
  'windows': (3, 0),
}


def decoder(vocab_size: int, *, num_layers: int = 2, **sizes) -> GemmaConfig:
  """A Gemma 3: norms of queries and keys, and two kinds of positions."""
  defaults = {
    'has_qk_norm': True,
    'rope_base': 1e6,
    'rope_factor': 8.0,
    'num_layers': num_layers,
  }
  return GemmaConfig(vocab_size=vocab_size, **(_SIZES | defaults | sizes))


def gemma_2(vocab_size: int, **sizes) -> GemmaConfig:
  """A Gemma 2: bounded scores and logits, and one kind of positions."""
  defaults = {
    'has_qk_norm': False,
    'rope_base': 1e4,
    'rope_factor': 1.0,
    'attention_softcap': 3.0,
    'logits_softcap': 9.0,
  }
  return decoder(vocab_size, **(defaults | sizes))


def gemma_4(vocab_size: int, **sizes) -> Gemma4Config:
  """A Gemma 4 like the 31B: full layers whose value is their key, and whose
  heads have another number and size."""
  defaults = {
    'num_layers': 3,
    'embed_dim': 8,
    'num_heads': 4,
    'num_kv_heads': 2,
    'head_dim': 4,
    'full_num_kv_heads': 1,
    'full_head_dim': 8,
    'mlp_dim': 12,
    'windows': (3, 0),
    'full_key_is_value': True,
    'logits_softcap': 9.0,
  }
  return Gemma4Config(vocab_size=vocab_size, **(defaults | sizes))


def gemma_4_e2b(vocab_size: int, **sizes) -> Gemma4Config:
  """A Gemma 4 like the E2B: embeddings for each layer, and layers that read the
  keys of earlier ones and have a wider feed-forward."""
  defaults = {
    'num_layers': 4,
    'full_num_kv_heads': 2,
    'full_key_is_value': False,
    'num_shared_layers': 2,
    'has_wide_shared_mlp': True,
    'per_layer_dim': 4,
    'per_layer_vocab_size': vocab_size,
  }
  return gemma_4(vocab_size, **(defaults | sizes))


def gemma_4_moe(vocab_size: int, **sizes) -> Gemma4Config:
  """A Gemma 4 like the 26B-A4B, with experts beside each feed-forward."""
  defaults = {'num_experts': 4, 'num_chosen_experts': 2, 'expert_dim': 4}
  return gemma_4(vocab_size, **(defaults | sizes))


def encoder_decoder(
  vocab_size: int, *, num_layers: int = 2, **sizes
) -> T5GemmaConfig:
  """A T5Gemma whose encoder is narrower than its decoder."""
  defaults = {
    'encoder_embed_dim': 6,
    'num_encoder_layers': num_layers,
    'encoder_num_heads': 2,
    'encoder_num_kv_heads': 1,
    'encoder_mlp_dim': 10,
    'num_decoder_layers': num_layers,
    'attention_softcap': 3.0,
    'logits_softcap': 9.0,
  }
  return T5GemmaConfig(vocab_size=vocab_size, **(_SIZES | defaults | sizes))


def params(config, *, seed: int, scale: float = 1.5):
  """Random weights; logits are of the scale."""
  rng = np.random.default_rng(seed)
  # What a norm of Gemma 4 stores is the whole factor.
  offset = 1.0 if hasattr(config, 'full_head_dim') else 0.0

  def draw(path, leaf):
    if jnp.issubdtype(leaf.dtype, jnp.integer):
      return jnp.asarray(rng.permutation(leaf.size), leaf.dtype)
    name = jax.tree_util.keystr(path)
    values = rng.normal(size=leaf.shape)
    if 'scale' in name:
      # What layers add outweighs the last token, which the logits reuse.
      values = 0.3 * values + 2.0 * ('post' in name) + offset
    elif 'layer_scalar' in name:
      values = 0.7 + 0.1 * values
    elif 'embedding' in name:
      values = scale * values / np.sqrt(leaf.shape[1])
    else:
      # Kernels of experts lie one after the other.
      values = values / np.sqrt(leaf.shape[max(leaf.ndim - 2, 0)])
    return jnp.asarray(values, leaf.dtype)

  return jax.tree_util.tree_map_with_path(draw, families.param_shapes(config))


def model(config):
  """The language model; its params are `params`."""
  return families.language_model(config)
