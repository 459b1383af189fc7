"""Where an EAGLE-3 network begins: sizes that fit a target, and parameters."""

import functools
from pathlib import Path

import jax
import jax.numpy as jnp

from specdec_jax.base import Array
from specdec_jax.launch import processes, progress
from specdec_jax.models.drafting import eagle
from specdec_jax.models.drafting.eagle import EagleConfig
from specdec_jax.models.llama import LlamaConfig
from specdec_jax.training import eagle as training
from specdec_jax.training.data import written_texts
from specdec_jax.training.data.written_texts import Folders
from specdec_jax.training.losses import ArrayTree

# The least scale that is divided by, and the share of weights that are drawn.
_LEAST_SCALE = 0.01
_SHARE_OF_OTHERS = 0.1


def eagle_config(
  *,
  target: str,
  texts: Folders,
  draft_vocab_size: int = 8192,
  mlp_dim: int | None = None,
  num_heads: int | None = None,
  num_kv_heads: int | None = None,
) -> EagleConfig:
  """Chooses sizes that fit a target, by default those of its own layers.

  It reads the streams that were kept in `texts`, a folder of `specdec data
  write --prompts`, or several, but the last of them, which is the target's
  output. Features are normed one by one, and the normed state is that of the
  next drafted position. ValueError if the last stream is another, folders have
  different ones, or another target wrote the texts.
  """
  config, params = training.read_target(target, jnp.float32)
  own = training.head_digest(training.head_of(config, params))
  first, *others = written_texts.names(texts)
  layers = _layers(first, config, target, own)
  for folder in others:
    if (found := _layers(folder, config, target, own)) != layers:
      raise ValueError(
        f'{folder} has the streams of layers {found}, {first} of {layers}'
      )
  return EagleConfig(
    vocab_size=config.vocab_size,
    draft_vocab_size=draft_vocab_size,
    embed_dim=config.embed_dim,
    target_embed_dim=config.embed_dim,
    feature_layers=tuple(layers[:-1]),
    num_heads=num_heads or config.num_heads,
    num_kv_heads=num_kv_heads or config.num_kv_heads,
    head_dim=config.head_dim,
    mlp_dim=mlp_dim or config.mlp_dim,
    rope_base=config.rope_base,
    norm_epsilon=config.norm_epsilon,
    max_positions=config.max_positions,
    fc_norm=True,
    norm_before_next=True,
  )


def _layers(
  folder: str | Path, config: LlamaConfig, target: str, digest: str
) -> list[int]:
  """Reads the layers whose streams a folder has; ValueError if a drafter needs
  others, or the target of this digest did not write it."""
  description = written_texts.load_description(folder)
  layers = description.counts('layers', [])
  if len(layers) < 2 or layers[-1] != config.num_layers:
    raise ValueError(
      f'{folder} has the streams of layers {layers}; an EAGLE-3 drafter '
      f'needs some and the last output: give specdec data write --layers, '
      f'and {config.num_layers} as the last of them'
    )
  # Earlier versions wrote no digest.
  if description.text(training.HEAD_DIGEST, digest) != digest:
    raise ValueError(
      f'{folder} was written by another model than {target}: by '
      f'{description.text("model", "one")}, with other logits'
    )
  return layers


def eagle_params(
  config: EagleConfig,
  rng_key: Array,
  *,
  target: str,
  texts: Folders,
  num_parts: int | None = None,
) -> ArrayTree:
  """Makes the first parameters: near the target's, but for a layer, drawn.

  The tokens that can be drafted are those that the target wrote most often in
  `texts`, as for `eagle_config`; how much of its output they cover is printed.
  """
  counts = written_texts.token_counts(
    texts, config.vocab_size, num_parts=num_parts
  )
  ids, coverage = written_texts.most_frequent(counts, config.draft_vocab_size)
  if processes.is_first():
    progress.show(
      f'{len(ids):,} of {config.vocab_size:,} tokens can be drafted: '
      f'{coverage:.2%} of {counts.sum():,} that {target} wrote'
    )
  found, params = training.read_target(target, jnp.float32)
  return begun(config, rng_key, found, params, jnp.asarray(ids, jnp.int32))


def begun(
  config: EagleConfig,
  rng_key: Array,
  target_config: LlamaConfig,
  target_params: ArrayTree,
  target_ids: Array,
) -> ArrayTree:
  """Does what `eagle_params` does, for a target that is read and `target_ids`
  `[V_draft]`, the tokens that can be drafted."""
  head = training.head_of(target_config, target_params)
  scale_of = functools.partial(_norm_scale, target_config, target_params)
  params = jax.jit(eagle.init_params, static_argnums=0)(config, rng_key)
  # Logits and their norm begin as the target's, and other norms as those of its
  # layers that read the same, which hold outlying dimensions of a stream down.
  params['target_ids'] = target_ids
  params['logits_dense'] = {'kernel': head.rows[target_ids].T}
  params['decoder_norm'] = {'scale': head.norm}
  params['embedding_layer_norm'] = {'scale': scale_of(0)}
  for i, layer in enumerate(config.feature_layers):
    params[f'feature_norms_{i}'] = {'scale': scale_of(layer)}
  # The hidden state begins as the last feature, so that the layer adds to a
  # stream from which those logits can be read. Features are normed with their
  # scale before they come here: the identity on the last of them has to divide
  # by it; where it is nearly 0, by a bit more.
  last = scale_of(config.feature_layers[-1])
  undone = jnp.sign(last) / jnp.maximum(jnp.abs(last), _LEAST_SCALE)
  others = params['features_dense']['kernel'][: -last.size]
  kernel = jnp.concatenate([_SHARE_OF_OTHERS * others, jnp.diag(undone)])
  params['features_dense'] = {'kernel': kernel}
  return params


def _norm_scale(config: LlamaConfig, params: ArrayTree, layer: int) -> Array:
  """Finds the scale `[embed]` of the norm by which a target reads the input of
  a layer, or its own output; of root mean square 1."""
  if layer == config.num_layers:
    scale = params['decoder_norm']['scale']
  else:
    norms = params[f'layers_{layer}']
    scale = norms['pre_self_attention_layer_norm']['scale']
  return scale / jnp.sqrt(jnp.mean(scale**2))
