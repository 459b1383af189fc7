"""T5Gemma: an encoder and a decoder of Gemma 2's layers.

Zhang et al., arXiv 2504.06225. The encoder's windows extend to both sides. A
decoder layer attends to its own text, then to the encoder, whose keys and
values are computed once per decode. Each stack has its own embeddings.
"""

import dataclasses

import flax.linen as nn
import jax.numpy as jnp

from specdec_jax.base import Array, Placement
from specdec_jax.models import attention, kv_cache, networks
from specdec_jax.models.gemma import layers
from specdec_jax.models.gemma.decoder import Decoder
from specdec_jax.models.gemma.layers import GemmaConfig
from specdec_jax.models.kv_cache import CrossCache, KVCache


@dataclasses.dataclass(frozen=True, kw_only=True)
class T5GemmaConfig:
  """Sizes of a T5Gemma.

  Sizes that begin with `encoder_` are the encoder's and have counterparts of
  the decoder; the others hold for both. See `GemmaConfig`. With a window of W,
  a decoder token sees itself and W - 1 tokens before it, an encoder token W to
  either side.
  """

  vocab_size: int
  encoder_embed_dim: int
  num_encoder_layers: int
  encoder_num_heads: int
  encoder_num_kv_heads: int
  encoder_mlp_dim: int
  embed_dim: int
  num_decoder_layers: int
  num_heads: int
  num_kv_heads: int
  mlp_dim: int
  head_dim: int
  query_pre_attn_scalar: int
  windows: tuple[int, ...] = (4096, 0)
  attention_softcap: float = 50.0
  logits_softcap: float = 30.0
  rope_base: float = 10_000.0
  norm_epsilon: float = 1e-6
  max_positions: int = 8192
  is_tied: bool = True
  dtype: jnp.dtype = jnp.float32
  cache_dtype: jnp.dtype | None = None

  def __post_init__(self):
    # These raise ValueError for sizes that do not fit together.
    stack(self, 'encoder'), stack(self, 'decoder')


def stack(config: T5GemmaConfig, name: str) -> GemmaConfig:
  """Returns the sizes of one stack; `name` is `encoder` or `decoder`."""
  fields = {field.name for field in dataclasses.fields(GemmaConfig)}
  sizes = {key: x for key, x in vars(config).items() if key in fields}
  if name == 'encoder':
    # `encoder_mlp_dim` is the encoder's `mlp_dim`.
    sizes |= {
      key.removeprefix('encoder_'): value
      for key, value in vars(config).items()
      if key.startswith('encoder_')
    }
  return GemmaConfig(
    num_layers=getattr(config, f'num_{name}_layers'),
    local_rope_base=config.rope_base,
    **sizes,
  )


class Encoder(nn.Module):
  """The encoder stack: int32 `[B, E]`, 0 where padded, to `[B, E, embed]`."""

  config: GemmaConfig

  @nn.compact
  def __call__(self, tokens: Array) -> Array:
    config = self.config
    embed = layers.embed(config, name='token_embedder')
    x = layers.scaled(config, embed(tokens))
    positions = jnp.arange(tokens.shape[1], dtype=jnp.int32)[None]
    # With a window of 2, token 5 sees tokens 3 to 7.
    distances = jnp.abs(positions[:, :, None] - positions[:, None, :])
    is_token = (tokens > 0)[:, None, :]
    for i, window in enumerate(attention.layer_windows(config)):
      mask = is_token & (distances <= window) if window else is_token
      layer = networks.traced_once(self, layers.Layer)
      call = layer(config, window, name=f'layers_{i}')
      x, _, _ = call(x, None, positions, mask)
    return layers.norm(config, name='encoder_norm')(x)


class T5Gemma(nn.Module):
  """The whole network; its methods are the steps of decoding."""

  config: T5GemmaConfig

  def setup(self):
    self.encoder = Encoder(stack(self.config, 'encoder'))
    self.decoder = Decoder(stack(self.config, 'decoder'), has_cross=True)

  def cross_cache(self, encoder_tokens: Array) -> CrossCache:
    """Encodes int32 `[B, E]`, 0 where padded, and computes each layer's keys
    and values of cross-attention."""
    encoded, is_token = self.encoder(encoder_tokens), encoder_tokens > 0
    layers = self.decoder.layers
    return kv_cache.crossed(self.config, layers, encoded, is_token)

  def extend(
    self, tokens: Array, cache: KVCache, placement: Placement | None = None
  ) -> tuple[Array, KVCache]:
    """Appends int32 `[B, T]` tokens; see `Decoder.extend`."""
    return self.decoder.extend(tokens, cache, placement)

  def project(self, x: Array) -> Array:
    """Projects `[B, T, embed]` to float32 logits `[B, T, V]`."""
    return self.decoder.project(x)
