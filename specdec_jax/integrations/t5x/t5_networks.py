"""Converts T5X's networks, parameters and checkpoints to this package's T5, and
loads those of a draft model (needs no T5X)."""

import copy
import functools
from collections.abc import Callable
from typing import Any

import flax
import jax
import jax.numpy as jnp
import numpy as np

from specdec_jax.checkpoints import parameters, stored_arrays
from specdec_jax.checkpoints import t5x as t5x_checkpoints
from specdec_jax.models.families import Config
from specdec_jax.models.products import Weights
from specdec_jax.models.t5 import T5Config

# The fields of the configurations of `t5x.examples.t5` and of
# `t5x.examples.decoder_only`.
_SHARED_FIELDS = {
  *('vocab_size', 'dtype', 'emb_dim', 'num_heads', 'head_dim', 'mlp_dim'),
  *('mlp_activations', 'dropout_rate', 'logits_via_embedding'),
}
_KNOWN_FIELDS = (
  _SHARED_FIELDS
  | {'num_encoder_layers', 'num_decoder_layers', 'float32_attention_logits'},
  _SHARED_FIELDS | {'num_layers'},
)
_ACTIVATIONS = ('gelu', 'relu', 'silu', 'linear')
# Where a T5X model keeps the parameters of its draft model.
DRAFT = 'draft'


def refusal(sentence: str) -> ValueError:
  """Returns an error with this sentence, and a pointer to the documentation."""
  return ValueError(f'{sentence}; see docs/t5x.md')


def config_of(module: Any) -> T5Config:
  """Returns the config of a network of `t5x.examples.t5` or `.decoder_only`;
  ValueError for another, which this package's T5 may not compute."""
  name = f'{type(module).__module__}.{type(module).__qualname__}'
  if getattr(module, 'scan_layers', False):
    raise refusal(
      f'{name} scans its layers, which speculation does not support: use a '
      'network of t5x.examples.t5 or of t5x.examples.decoder_only'
    )
  sizes = getattr(module, 'config', None)
  fields = set(getattr(sizes, '__dataclass_fields__', ()))
  # A further field can mean another network: T5X's examples are copied and
  # changed.
  if fields not in _KNOWN_FIELDS:
    nearest = min(_KNOWN_FIELDS, key=lambda names: len(names ^ fields))
    raise refusal(
      f'{name} is not a network that speculation supports: its configuration '
      f'lacks {sorted(nearest - fields)} and also has '
      f'{sorted(fields - nearest)}'
    )
  assert sizes is not None
  if unknown := sorted(set(sizes.mlp_activations) - set(_ACTIVATIONS)):
    raise refusal(f'mlp_activations {unknown} are none of {_ACTIVATIONS}')
  return T5Config(
    vocab_size=sizes.vocab_size,
    embed_dim=sizes.emb_dim,
    num_encoder_layers=getattr(sizes, 'num_encoder_layers', 0),
    num_decoder_layers=(
      sizes.num_layers if 'num_layers' in fields else sizes.num_decoder_layers
    ),
    num_heads=sizes.num_heads,
    head_dim=sizes.head_dim,
    mlp_dim=sizes.mlp_dim,
    mlp_activations=tuple(sizes.mlp_activations),
    is_tied=sizes.logits_via_embedding,
    dtype=jnp.dtype(sizes.dtype),
    has_float32_scores=getattr(sizes, 'float32_attention_logits', False),
  )


def params_of(params: Weights, config: Config, *, role: str) -> Weights:
  """Returns a network's parameters in the dtypes that T5X computes with;
  ValueError, with the `role`, if names or shapes do not fit its config."""
  # A tree of other names or shapes could decode to wrong tokens.
  params = flax.core.unfreeze(params)
  wanted = {p.name: p.in_file for p in parameters.of(config)}
  stored_arrays.check(stored_arrays.flatten(params), wanted, f'the {role}')
  # T5X rounds every kernel to the dtype of the activations, but multiplies the
  # last projection, or embeddings that serve as it, in float32.
  last = 'token_embedder' if config.is_tied else 'logits_dense'

  def cast(path, leaf):
    is_last = path[-2].key == last
    return leaf.astype(jnp.float32 if is_last else config.dtype)

  return jax.tree_util.tree_map_with_path(cast, params)


def load_draft(
  state_dict: Weights,
  target_state_dict: Weights,
  *,
  path: str,
  is_resuming: bool = False,
) -> Weights:
  """Adds the checkpoint of a draft model to the target's, at `draft`.

  One of T5X's `state_transformation_fns`: `state_dict` is the target's
  checkpoint, or that of both models if `is_resuming`; `target_state_dict` is
  the state to restore into. Raises ValueError if `path` has no draft model of
  this network.
  """
  if is_resuming:  # The checkpoint already has the draft model.
    return state_dict
  expected = flax.core.unfreeze(target_state_dict)['target'].get(DRAFT)
  if expected is None:
    raise refusal(
      'load_draft: the model has no draft model to load; set draft_module'
    )
  expected = jax.tree.map(
    lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), expected
  )
  draft = t5x_checkpoints.read_target(path, expected)
  draft = jax.tree.map(np.asarray, draft)
  return {**state_dict, 'target': {**state_dict['target'], DRAFT: draft}}


def restore_with_draft(restore_checkpoint_cfg: Any, *, path: str) -> Any:
  """Extends T5X's `RestoreCheckpointConfig` of the target to also restore the
  draft model at `path`; its other transformations see only the target."""
  # dataclasses.replace would add the transformation of assignment_map twice.
  config = copy.copy(restore_checkpoint_cfg)
  transforms = [
    functools.partial(_of_target_alone, transform)
    for transform in restore_checkpoint_cfg.state_transformation_fns
  ]
  load = functools.partial(load_draft, path=path)
  config.state_transformation_fns = (*transforms, load)
  return config


def _of_target_alone(
  transform: Callable[..., Weights],
  state_dict: Weights,
  target_state_dict: Weights,
  **is_resuming: bool,
) -> Weights:
  """Applies a transformation to the states without their draft model, which is
  added to the result."""
  state_dict, draft = _split(state_dict)
  target_state_dict, _ = _split(target_state_dict)
  result = transform(state_dict, target_state_dict, **is_resuming)
  if not draft:
    return result
  return {**result, 'target': {**result['target'], **draft}}


def _split(state_dict: Weights) -> tuple[Weights, Weights]:
  """Splits a state into the target's, and the draft model by its name."""
  # Copies the dicts that it changes, as T5X still uses the state.
  state_dict = flax.core.unfreeze(state_dict)
  target = dict(state_dict['target'])
  draft = {name: target.pop(name) for name in (DRAFT,) if name in target}
  return {**state_dict, 'target': target}, draft
