"""Where a block drafter begins: sizes that fit a target, and parameters."""

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
from specdec_jax.training.data import token_files, written_texts
from specdec_jax.training.losses import ArrayTree

# Of what is drawn, beside what begins as in the target.
_SHARE = 0.1


def block_config(
  *,
  target: str,
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
  """Chooses sizes that fit a target, by default those of its own layers.

  Without `feature_layers`, all streams of the target are read, but at most
  five, evenly spaced. Behind an encoder, the drafter's layers read the source
  by the target's last layers, unless `cross_layers` names others, or none.
  Speculators can read a drafter without `feature_norms`, with a `mask_token_id`
  and with `has_qk_norm`, by default as the target.
  """
  config: Any = loading.read_config(
    loading.locate(target), dtype=jnp.dtype('float32')
  )
  network = families.network(config)
  count = network.num_layers
  if not feature_layers:
    spaced = np.linspace(1, count, min(count, 5)).round().astype(int)
    feature_layers = sorted(set(spaced.tolist()))
  if cross_layers is None:
    last = range(count)[-num_layers:] if network.has_encoder else ()
    # A drafter deeper than the target reads its first layer several times.
    missing = num_layers - len(last) if network.has_encoder else 0
    cross_layers = [0] * missing + list(last)
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
  )


def block_params(
  config: BlockDrafterConfig,
  rng_key: Array,
  *,
  target: str,
  tokens: str | Sequence[str],
) -> ArrayTree:
  """Makes the first parameters.

  The tokens that can be drafted are the most frequent of the targets in the
  folders `tokens`; their share is printed. Layers begin as the last ones of the
  target, with the channels of their feed-forwards that weigh most, the context
  as the input of its last layer, and the Markov head without effect, with
  projections of the target's embeddings.
  """
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
  found = loading.read(loading.locate(target), dtype=jnp.dtype('float32'))
  return begun(config, rng_key, *found, jnp.asarray(ids, jnp.int32))


def begun(
  config: BlockDrafterConfig,
  rng_key: Array,
  target_config: Any,
  target_params: ArrayTree,
  target_ids: Array,
) -> ArrayTree:
  """Does what `block_params` does, for a target that is read and `target_ids`
  `[V_draft]`, the tokens that can be drafted."""
  config = dataclasses.replace(config, dtype=jnp.dtype('float32'))
  init_key, project_key, mask_key = jax.random.split(rng_key, 3)
  params = jax.jit(block_drafter.init_params, static_argnums=0)(
    config, init_key
  )
  params['target_ids'] = target_ids
  network = families.network(target_config)
  embedding = network.token_embedder(target_params)['embedding']
  # A mask begins as a token that is nearly all tokens at once.
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
  """Makes what begins as in the target: layers as its last ones, the context as
  the input of its last layer, and the last norm."""
  decoder = target_params.get('decoder', target_params)
  num_layers = families.num_layers(target_config)[-1]
  is_t5 = hasattr(target_config, 'relpos_num_buckets')
  # T5's scores are not scaled, but its tied logits are.
  query_scale = config.head_dim**0.5 if is_t5 else 1.0
  is_scaled = is_t5 and target_config.is_tied
  logits_scale = config.embed_dim**-0.5 if is_scaled else 1.0
  begun = {}
  for i in range(config.num_layers):
    at = max(num_layers - config.num_layers + i, 0)
    theirs = decoder[f'layers_{at}']
    # Norms that the target's layers lack begin as drawn.
    attention = {
      name: theirs['self_attention'].get(name, drawn)
      for name, drawn in params[f'layers_{i}']['attention'].items()
    }
    kernel = attention['query']['kernel'] * query_scale
    attention['query'] = attention['query'] | {'kernel': kernel}
    begun[f'layers_{i}'] = {
      'pre_attention_layer_norm': theirs['pre_self_attention_layer_norm'],
      'attention': attention,
      'pre_mlp_layer_norm': theirs['pre_mlp_layer_norm'],
      'mlp': _largest(theirs['mlp'], config.mlp_dim),
    }
    if config.cross_layers:
      cross = theirs['encoder_decoder_attention']
      begun[f'layers_{i}'] |= {
        'pre_cross_attention_layer_norm': (
          theirs['pre_cross_attention_layer_norm']
        ),
        'cross_attention': {name: cross[name] for name in ('query', 'out')},
      }
  last = decoder[f'layers_{num_layers - 1}']
  scale = last['pre_self_attention_layer_norm']['scale']
  begun['context_norm'] = {'scale': scale}
  # The features are normed one by one; of the others a little is added.
  kernel = _SHARE * params['features_dense']['kernel']
  if num_layers - 1 in config.feature_layers:
    first = config.feature_layers.index(num_layers - 1) * config.embed_dim
    rows = slice(first, first + config.embed_dim)
    kernel = kernel.at[rows].set(jnp.eye(config.embed_dim))
  begun['features_dense'] = {'kernel': kernel}
  norm = decoder['decoder_norm']['scale']
  begun['decoder_norm'] = {'scale': norm * logits_scale}
  return begun


def _largest(mlp: ArrayTree, size: int) -> ArrayTree:
  """Keeps those `size` channels of a feed-forward whose weights are largest."""
  columns = {name: leaf['kernel'] for name, leaf in mlp.items() if name != 'wo'}
  rows = mlp['wo']['kernel']
  sizes = jnp.linalg.norm(rows, axis=1)
  for kernel in columns.values():
    sizes = sizes * jnp.linalg.norm(kernel, axis=0)
  kept = jnp.sort(jnp.argsort(-sizes)[:size])
  cut = {name: {'kernel': kernel[:, kept]} for name, kernel in columns.items()}
  return cut | {'wo': {'kernel': rows[kept]}}
