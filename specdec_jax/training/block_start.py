"""The config of a block drafter for a target, and its initial parameters."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from specdec_jax.base import Array
from specdec_jax.checkpoints import loading
from specdec_jax.files.paths import user_path
from specdec_jax.launch import processes, progress
from specdec_jax.models import families
from specdec_jax.models.drafting import block_drafter
from specdec_jax.models.drafting.block_layers import BlockDrafterConfig
from specdec_jax.training import eagle_start
from specdec_jax.training.data import token_files, written_texts
from specdec_jax.training.data.written_texts import Folders
from specdec_jax.training.losses import ArrayTree

# The scale of random weights, relative to those copied from the target.
_SHARE = 0.1


def block_config(
  *,
  target: str,
  texts: Folders | None = None,
  num_layers: int = 2,
  block_size: int = 6,
  draft_vocab_size: int = 4096,
  mlp_dim: int | None = None,
  feature_layers: Sequence[int] = (),
  cross_layers: Sequence[int] | None = None,
  markov_rank: int = 64,
  markov_head: str = 'vanilla',
  has_confidence: bool = True,
  is_causal: bool = False,
  feature_norms: bool = True,
  mask_token_id: int | None = None,
  has_qk_norm: bool | None = None,
) -> BlockDrafterConfig:
  """Returns the config of a drafter for a target; by default of the same sizes.

  By default `feature_layers` are those whose streams are stored in `texts` or
  else at most five of the target, evenly spaced. With an encoder,
  `cross_layers` are by default the target's last layers, whose keys and values
  of the source the drafter's layers read. `has_qk_norm` defaults to the
  target's. For speculators, a drafter needs a `mask_token_id` and no
  `feature_norms`. ValueError if `texts` has other streams.
  """
  config: Any = loading.read_config(
    loading.locate(target), dtype=jnp.dtype('float32')
  )
  network = families.network(config)
  count = network.num_layers
  stored = eagle_start.feature_layers(target, texts) if texts else ()
  feature_layers = feature_layers or stored
  if stored and tuple(feature_layers) != stored:
    raise ValueError(
      f'{texts} has the streams of layers {list(stored)}, and feature_layers '
      f'is {list(feature_layers)}'
    )
  if not feature_layers:
    spaced = np.linspace(1, count, min(count, 5)).round().astype(int)
    feature_layers = sorted(set(spaced.tolist()))
  if cross_layers is None:
    last = range(count)[-num_layers:] if network.has_encoder else ()
    # A drafter deeper than the target uses its first layer several times.
    missing = num_layers - len(last) if network.has_encoder else 0
    cross_layers = [0] * missing + list(last)
  # A target with rotary positions has layers to begin from that know them.
  names = ('rope_base', 'norm_epsilon', 'max_positions')
  rotary = {
    name: getattr(config, name) for name in names if hasattr(config, name)
  }
  return BlockDrafterConfig(
    vocab_size=config.vocab_size,
    draft_vocab_size=min(draft_vocab_size, config.vocab_size),
    embed_dim=config.embed_dim,
    num_layers=num_layers,
    num_heads=config.num_heads,
    num_kv_heads=getattr(config, 'num_kv_heads', config.num_heads),
    head_dim=config.head_dim,
    mlp_dim=mlp_dim or config.mlp_dim,
    block_size=block_size,
    feature_layers=tuple(feature_layers),
    feature_norms=feature_norms,
    mask_token_id=mask_token_id,
    cross_layers=tuple(cross_layers),
    cross_num_heads=config.num_heads if cross_layers else 0,
    cross_head_dim=config.head_dim if cross_layers else 0,
    markov_rank=markov_rank,
    markov_head=markov_head,
    has_confidence=has_confidence,
    is_causal=is_causal,
    has_qk_norm=(
      getattr(config, 'has_qk_norm', False)
      if has_qk_norm is None
      else has_qk_norm
    ),
    mlp_activations=getattr(config, 'mlp_activations', ('silu', 'linear')),
    **rotary,
  )


def block_params(
  config: BlockDrafterConfig,
  rng_key: Array,
  *,
  target: str,
  tokens: str | Sequence[str] = (),
  texts: Folders | None = None,
) -> ArrayTree:
  """Returns the initial parameters.

  The draft vocabulary has the most frequent tokens of the targets in the
  folders `tokens`, or of what was written in those of `texts`; their share is
  printed. Layers start as the target's last ones, with the channels of their
  feed-forwards that have the largest weights; the context starts as the last
  feature that enters a layer of the target; the Markov head starts without
  effect, with projections of the target's embeddings.
  """
  if texts:
    counts = written_texts.token_counts(texts, config.vocab_size)
  else:
    names = [tokens] if isinstance(tokens, str) else tokens
    counts = np.zeros(config.vocab_size, np.int64)
    for name in names:
      file = token_files.load(user_path(name) / 'train.npz')
      counts += np.bincount(file.targets.tokens, minlength=config.vocab_size)
  ids, coverage = written_texts.most_frequent(counts, config.draft_vocab_size)
  if processes.is_first():
    progress.show(
      f'{len(ids):,} of {config.vocab_size:,} tokens can be drafted: '
      f'{coverage:.2%} of {counts.sum():,} that {target} wrote'
    )
  path = loading.locate(target)
  target_config, target_params = loading.read(path, dtype=jnp.dtype('float32'))
  target_ids = jnp.asarray(ids, jnp.int32)
  return initial_params(
    config, rng_key, target_config, target_params, target_ids
  )


def initial_params(
  config: BlockDrafterConfig,
  rng_key: Array,
  target_config: Any,
  target_params: ArrayTree,
  target_ids: Array,
) -> ArrayTree:
  """Returns the parameters of `block_params` for a loaded target and a draft
  vocabulary, `target_ids` `[V_draft]`."""
  config = dataclasses.replace(config, dtype=jnp.dtype('float32'))
  init_key, project_key, mask_key = jax.random.split(rng_key, 3)
  params = jax.jit(block_drafter.init_params, static_argnums=0)(
    config, init_key
  )
  params['target_ids'] = target_ids
  network = families.network(target_config)
  embedding = network.token_embedder(target_params)['embedding']
  # The mask starts near the mean of all embeddings.
  spread = jnp.std(embedding)
  noise = jax.random.normal(mask_key, (config.embed_dim,))
  if config.mask_token_id is None:
    params['mask_embedding'] = embedding.mean(0) + _SHARE * spread * noise
  if config.markov_rank:
    shape = config.embed_dim, config.markov_rank
    projection = jax.random.normal(project_key, shape)
    size = spread * config.embed_dim**0.5
    params['markov_embedder'] = {'embedding': embedding @ projection / size}
    kernel = params['markov_dense']['kernel']
    params['markov_dense'] = {'kernel': jnp.zeros_like(kernel)}
  last = _from_last_layers(config, params, target_config, target_params)
  return params | last


def _from_last_layers(
  config: BlockDrafterConfig,
  params: ArrayTree,
  target_config: Any,
  target_params: ArrayTree,
) -> ArrayTree:
  """Returns the parameters that are copied from the target: layers from its
  last ones, the projection to the last feature that enters a layer, the last
  norm."""
  decoder = target_params.get('decoder', target_params)
  num_layers = families.num_layers(target_config)[-1]
  is_t5 = hasattr(target_config, 'relpos_num_buckets')
  # T5's scores are not scaled, but its tied logits are.
  query_scale = config.head_dim**0.5 if is_t5 else 1.0
  is_scaled = is_t5 and target_config.is_tied
  logits_scale = config.embed_dim**-0.5 if is_scaled else 1.0
  copied = {}
  for i in range(config.num_layers):
    source_index = max(num_layers - config.num_layers + i, 0)
    source = decoder[f'layers_{source_index}']
    # Norms that the target's layers lack stay random.
    attention = {
      name: source['self_attention'].get(name, initial)
      for name, initial in params[f'layers_{i}']['attention'].items()
    }
    kernel = attention['query']['kernel'] * query_scale
    attention['query'] = attention['query'] | {'kernel': kernel}
    copied[f'layers_{i}'] = {
      'pre_attention_layer_norm': source['pre_self_attention_layer_norm'],
      'attention': attention,
      'pre_mlp_layer_norm': source['pre_mlp_layer_norm'],
      'mlp': _largest(source['mlp'], config.mlp_dim),
    }
    if config.cross_layers:
      cross = source['encoder_decoder_attention']
      copied[f'layers_{i}'] |= {
        'pre_cross_attention_layer_norm': (
          source['pre_cross_attention_layer_norm']
        ),
        'cross_attention': {name: cross[name] for name in ('query', 'out')},
      }
  last = decoder[f'layers_{num_layers - 1}']
  scale = last['pre_self_attention_layer_norm']['scale']
  copied['context_norm'] = {'scale': scale}
  # The features are normed one by one; the others start with small weights.
  kernel = _SHARE * params['features_dense']['kernel']
  entering = [layer for layer in config.feature_layers if layer < num_layers]
  if entering:
    first = (len(entering) - 1) * config.embed_dim
    rows = slice(first, first + config.embed_dim)
    kernel = kernel.at[rows].set(jnp.eye(config.embed_dim))
  copied['features_dense'] = {'kernel': kernel}
  norm = decoder['decoder_norm']['scale']
  copied['decoder_norm'] = {'scale': norm * logits_scale}
  return copied


def _largest(mlp: ArrayTree, size: int) -> ArrayTree:
  """Selects the `size` channels of a feed-forward with the largest weights."""
  columns = {name: leaf['kernel'] for name, leaf in mlp.items() if name != 'wo'}
  rows = mlp['wo']['kernel']
  sizes = jnp.linalg.norm(rows, axis=1)
  for kernel in columns.values():
    sizes = sizes * jnp.linalg.norm(kernel, axis=0)
  channels = jnp.sort(jnp.argsort(-sizes)[:size])
  cut = {
    name: {'kernel': kernel[:, channels]} for name, kernel in columns.items()
  }
  return cut | {'wo': {'kernel': rows[channels]}}
