"""The config of an EAGLE-3 network for a target, and its initial parameters."""

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

# The least scale by which weights are divided, and the scale of random weights.
_LEAST_SCALE = 0.01
_SHARE_OF_RANDOM = 0.1


def eagle_config(
  *,
  target: str,
  texts: Folders,
  draft_vocab_size: int = 8192,
  mlp_dim: int | None = None,
  num_heads: int | None = None,
  num_kv_heads: int | None = None,
) -> EagleConfig:
  """Returns the config of a drafter for a target; by default of the same sizes.

  The features are the streams stored in `texts`, one or several folders of
  `specdec data write --prompts`, but the last stream, which is the target's
  output. Features are normed one by one, and the normed state is fed to the
  next step. Raises ValueError if the last stream is not the output, folders
  have different streams, or another target wrote the texts.
  """
  config, _ = training.read_target(target, jnp.float32)
  return EagleConfig(
    vocab_size=config.vocab_size,
    draft_vocab_size=draft_vocab_size,
    embed_dim=config.embed_dim,
    target_embed_dim=config.embed_dim,
    feature_layers=feature_layers(target, texts),
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


def feature_layers(target: str, texts: Folders) -> tuple[int, ...]:
  """Reads the layers whose streams are stored in `texts`, but for the target's
  output; ValueError as of `eagle_config`."""
  config, params = training.read_target(target, jnp.float32)
  digest = training.head_digest(training.head_of(config, params))
  first, *more = written_texts.names(texts)
  layers = _layers(first, config, target, digest)
  for folder in more:
    folder_layers = _layers(folder, config, target, digest)
    if folder_layers != layers:
      raise ValueError(
        f'{folder} has the streams of layers {folder_layers}, {first} of '
        f'{layers}'
      )
  return tuple(layers[:-1])


def _layers(
  folder: str | Path, config: LlamaConfig, target: str, digest: str
) -> list[int]:
  """Reads the layers whose streams a folder has, the target's output last;
  ValueError if they do not fit a drafter, or the target of this digest did not
  write the texts."""
  description = written_texts.load_description(folder)
  layers = description.counts('layers', [])
  if len(layers) < 2 or layers[-1] != config.num_layers:
    raise ValueError(
      f'{folder} has the streams of layers {layers}; a drafter on features '
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
  """Returns the initial parameters: near the target's, with a random layer.

  The draft vocabulary has the tokens that the target wrote most often in
  `texts`, see `eagle_config`; the share of its output that they cover is
  printed.
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
  target_config, params = training.read_target(target, jnp.float32)
  target_ids = jnp.asarray(ids, jnp.int32)
  return initial_params(config, rng_key, target_config, params, target_ids)


def initial_params(
  config: EagleConfig,
  rng_key: Array,
  target_config: LlamaConfig,
  target_params: ArrayTree,
  target_ids: Array,
) -> ArrayTree:
  """Returns the parameters of `eagle_params` for a loaded target and a draft
  vocabulary, `target_ids` `[V_draft]`."""
  head = training.head_of(target_config, target_params)
  scale_of = functools.partial(_norm_scale, target_config, target_params)
  params = jax.jit(eagle.init_params, static_argnums=0)(config, rng_key)
  # Logits and their norm start as the target's. Other norms start as those of
  # the target's layers with the same input, which reduce outlier dimensions.
  params['target_ids'] = target_ids
  params['logits_dense'] = {'kernel': head.rows[target_ids].T}
  params['decoder_norm'] = {'scale': head.norm}
  params['embedding_layer_norm'] = {'scale': scale_of(0)}
  for i, layer in enumerate(config.feature_layers):
    params[f'feature_norms_{i}'] = {'scale': scale_of(layer)}
  # The hidden state starts as the last feature, so that the layer adds to a
  # stream from which the logits can be computed. Features are normed with a
  # scale, so that the identity on the last one divides by it; a scale near 0 is
  # replaced by a larger one.
  last = scale_of(config.feature_layers[-1])
  inverse = jnp.sign(last) / jnp.maximum(jnp.abs(last), _LEAST_SCALE)
  random = params['features_dense']['kernel'][: -last.size]
  kernel = jnp.concatenate([_SHARE_OF_RANDOM * random, jnp.diag(inverse)])
  params['features_dense'] = {'kernel': kernel}
  return params


def _norm_scale(config: LlamaConfig, params: ArrayTree, layer: int) -> Array:
  """Returns the scale `[embed]` of the norm of a layer's input, or of the last
  norm, divided by its root mean square."""
  if layer == config.num_layers:
    scale = params['decoder_norm']['scale']
  else:
    norms = params[f'layers_{layer}']
    scale = norms['pre_self_attention_layer_norm']['scale']
  return scale / jnp.sqrt(jnp.mean(scale**2))
