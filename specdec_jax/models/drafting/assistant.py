"""The network of Gemma 4's assistants.

Source: transformers 5.24, `models/gemma4_assistant`. Layers of a Gemma 4 that
have queries alone: they attend to the keys and values of the target's last
layers that have some. An input is the target's embedding of a token beside a
hidden state of the target's width; the output is projected to logits, and to
the hidden state of the next input.
"""

import dataclasses
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from specdec_jax.base import Array
from specdec_jax.drafters.assistant import AssistantModel
from specdec_jax.models import attention, quantized, taps
from specdec_jax.models.drafting.draft_vocabulary import NEVER
from specdec_jax.models.gemma import gemma4, layers
from specdec_jax.models.gemma.gemma4 import Gemma4Config
from specdec_jax.models.kv_cache import Entries, KVCache
from specdec_jax.models.layers import Dense, applied, parameter
from specdec_jax.models.networks import Bound, Network
from specdec_jax.models.products import Weights


@dataclasses.dataclass(frozen=True, kw_only=True)
class AssistantConfig:
  """Sizes of an assistant. `Gemma4Config` has the other attributes.

  Attributes:
    vocab_size: the target's.
    embed_dim: width of the residual stream.
    target_embed_dim: width of the target's residual stream.
    num_kv_heads: key-value heads of the target's layers with a window.
    full_num_kv_heads: key-value heads of the target's full layers.
    num_clusters: of tokens, of equal sizes, for a head that has logits of the
      likeliest clusters alone; 0 for logits of all tokens.
    num_chosen_clusters: how many have logits.
  """

  vocab_size: int
  embed_dim: int
  target_embed_dim: int
  num_layers: int
  num_heads: int
  num_kv_heads: int
  head_dim: int
  full_num_kv_heads: int
  full_head_dim: int
  mlp_dim: int
  windows: tuple[int, ...]
  num_clusters: int = 0
  num_chosen_clusters: int = 0
  rope_base: float = 1e6
  rope_factor: float = 1.0
  rope_fraction: float = 0.25
  local_rope_base: float = 10_000.0
  norm_epsilon: float = 1e-6
  max_positions: int = 131_072
  is_tied: bool = True
  dtype: jnp.dtype = jnp.float32

  def __post_init__(self):
    count, chosen = self.num_clusters, self.num_chosen_clusters
    if (count or chosen) and not 1 <= chosen <= count:
      raise ValueError(
        f'num_chosen_clusters {chosen} should be 1 to num_clusters {count}'
      )
    if count and self.vocab_size % count:
      raise ValueError(
        f'{self.vocab_size} tokens do not divide into {count} clusters'
      )
    # Raises ValueError for sizes that no Gemma 4 has.
    self.layers()

  def layers(self) -> Gemma4Config:
    """Makes the sizes of the layers as those of a Gemma 4."""
    names = {field.name for field in dataclasses.fields(Gemma4Config)}
    shared = {key: x for key, x in vars(self).items() if key in names}
    return Gemma4Config(**shared)


class Assistant(nn.Module):
  """The network; `init_params` makes its parameters.

  With clusters they include `token_ids`, int32 `[V]`: the tokens of the first
  cluster, then those of the second, and so on.
  """

  config: AssistantConfig

  def setup(self):
    config = self.config
    self.token_embedder = layers.embed(config)
    self.input_dense = Dense(config.embed_dim, config.dtype)
    sizes = config.layers()
    self.layers = [
      gemma4.Layer(sizes, window, has_keys=False)
      for window in attention.layer_windows(config)
    ]
    self.decoder_norm = gemma4.norm(config)
    self.hidden_dense = Dense(config.target_embed_dim, config.dtype)
    if config.num_clusters:
      self.clusters_dense = Dense(config.num_clusters)
      first_ids = lambda key, shape: jnp.arange(shape[0], dtype=jnp.int32)
      self.token_ids = parameter(
        self, 'token_ids', first_ids, (config.vocab_size,)
      )

  def __call__(
    self,
    embeddings: Array,
    hidden: Array,
    entries: dict[bool, tuple[Entries, Entries]],
    lengths: Array,
  ) -> tuple[Array, Array]:
    """Predicts what follows T tokens, all at position `lengths - 1`.

    Args:
      embeddings: `[B, T, target_embed]`, the target's, of the tokens.
      hidden: `[B, T, target_embed]`: the target's last hidden state at the
        position before the token, or what this function returned beside the
        token's logits.
      entries: the target's keys and values `[B, KV, S, D]` of layers with a
        window, at True, and of full layers, at False.
      lengths: int32 `[B]`, committed tokens: the entries of all but the last
        are seen.

    Returns:
      Float32 logits `[B, T, V]`, those of tokens outside of the chosen clusters
      `NEVER`; and hidden states `[B, T, target_embed]`.
    """
    positions = lengths[:, None] - 1
    x = self.input_dense(jnp.concatenate([embeddings, hidden], axis=-1))
    for layer in self.layers:
      keys, values = entries[layer.window > 0]
      # A token sees what the target has read. Windows of transformers that
      # look both ways include their end: of position 9 and a window of 4, the
      # entries 4 to 8.
      entry = jnp.arange(keys.shape[2], dtype=lengths.dtype)[None, None]
      position = positions[:, :, None]
      mask = entry < position
      if layer.window:
        mask &= entry >= position - 1 - layer.window
      x, _, _ = layer(x, (keys, values, lengths), positions, mask)
    x = self.decoder_norm(x)
    return self._logits(x), self.hidden_dense(x)

  def _logits(self, x: Array) -> Array:
    """Projects `[B, T, embed]` to float32 logits `[B, T, V]`."""
    config = self.config
    if not config.num_clusters:
      return self.token_embedder.attend(x)
    scores = self.clusters_dense(x)
    _, chosen = jax.lax.top_k(scores, config.num_chosen_clusters)
    # [B, T, k] of [C, V / C] ids: [B, T, k, V / C], and then flat.
    by_cluster = self.token_ids.reshape(config.num_clusters, -1)
    ids = by_cluster[chosen].reshape(*x.shape[:2], -1)
    flat_ids = ids.reshape(x.shape[0], -1)
    rows = self.token_embedder(flat_ids).reshape(*ids.shape, -1)
    logits = jnp.einsum(
      'btd,btnd->btn', x, rows, preferred_element_type=jnp.float32
    )
    # All tokens outside of the chosen clusters have the logit NEVER.
    shape = *x.shape[:2], config.vocab_size
    all_logits = jnp.full(shape, NEVER, jnp.float32)
    return jnp.put_along_axis(all_logits, ids, logits, axis=-1, inplace=False)


def init_params(config: AssistantConfig, rng_key: Array) -> Weights:
  """Initialises float32 parameters; `token_ids` are in their own order."""
  hidden = jnp.zeros((1, 1, config.target_embed_dim))

  def cache(num_heads: int, head_dim: int) -> tuple[Array, Array]:
    entries = jnp.zeros((1, num_heads, 1, head_dim))
    return entries, entries

  entries = {
    True: cache(config.num_kv_heads, config.head_dim),
    False: cache(config.full_num_kv_heads, config.full_head_dim),
  }
  lengths = jnp.ones(1, jnp.int32)

  def use_all(network: Assistant) -> Any:
    # Flax makes a parameter where it is first used; clusters look rows up.
    network.token_embedder(jnp.zeros((1, 1), jnp.int32))
    return network(hidden, hidden, entries, lengths)

  return Assistant(config).init(rng_key, method=use_all)['params']


def check_params(config: AssistantConfig, params: Weights) -> None:
  """Raises ValueError unless `token_ids` name every token once."""
  if not config.num_clusters:
    return
  ids = np.asarray(params['token_ids'])
  if not np.array_equal(np.sort(ids), np.arange(config.vocab_size)):
    raise ValueError(
      f'token_ids should name each of {config.vocab_size} tokens once; they '
      f'have {np.unique(ids).size} different ids, from {ids.min()} to '
      f'{ids.max()}'
    )


def bind(target: Network, config: AssistantConfig, *, width: int) -> Bound:
  """Binds the network to a target, for `drafters.assistant`; the target then
  keeps its last hidden states of the first `width` tokens of a call.

  The drafter's params are `{'assistant': ..., 'token_embedder': ...}`: the
  network's, and the target's token embeddings. Raises ValueError if the target
  is no Gemma 4 whose width and heads fit.
  """
  read = target.config
  if not isinstance(read, Gemma4Config):
    raise ValueError(
      'an assistant reads the keys and values of a Gemma 4: give the target '
      'that it was trained for'
    )
  if read.embed_dim != config.target_embed_dim:
    raise ValueError(
      f'the assistant is for a width of {config.target_embed_dim}, not '
      f'{read.embed_dim}: give the target that it was trained for'
    )
  sources = _sources(read, config)
  apply = applied(Assistant(config))

  def step(
    params: Weights,
    tokens: Array,
    hidden: Array,
    cache: KVCache,
    lengths: Array,
  ) -> tuple[Array, Array]:
    embedder = params['token_embedder']
    embeddings = quantized.look_up(embedder, tokens, read.dtype)
    entries = {
      has_window: (cache.keys[layer], cache.values[layer])
      for has_window, layer in sources.items()
    }
    logits, hidden = apply(
      params['assistant'],
      layers.scaled(read, embeddings),
      hidden,
      entries,
      lengths,
    )
    return logits, hidden

  return Bound(
    model=AssistantModel(step),
    target=taps.last_call(target, (taps.LAST,), width=width),
    join=lambda params, assistant_params: {
      'assistant': assistant_params,
      'token_embedder': target.token_embedder(params),
    },
  )


def _sources(target: Gemma4Config, config: AssistantConfig) -> dict[bool, int]:
  """Returns the layers whose keys and values are read: by True the target's
  last one with a window, by False its last full one."""
  windows = attention.layer_windows(target)[: target.num_cached_layers]
  sources: dict[bool, int] = {}
  for window in sorted(set(attention.layer_windows(config))):
    has_window = window > 0
    candidates = [i for i, w in enumerate(windows) if (w > 0) == has_window]
    label = 'with a window' if has_window else 'without a window'
    if not candidates:
      raise ValueError(
        f'the assistant reads a layer {label}; the target has none'
      )
    layer = candidates[-1]
    heads = target.heads(windows[layer])
    needed = config.layers().heads(window)
    if heads[1:3] != needed[1:3]:
      raise ValueError(
        f'layers {label} of the target have {heads.num_kv_heads} key-value '
        f'heads of {heads.head_dim}; the assistant reads '
        f'{needed.num_kv_heads} of {needed.head_dim}'
      )
    sources[has_window] = layer
  return sources
