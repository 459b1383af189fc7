"""A draft model's checkpoint beside that of a T5X model."""

import copy
import functools
from collections.abc import Callable
from typing import Any

import flax
import jax
import numpy as np

from specdec_jax.checkpoints import t5x as t5x_checkpoints
from specdec_jax.integrations.t5x.decoding import DRAFT
from specdec_jax.integrations.t5x.t5_networks import refusal


def load_draft(
  state_dict: Any,
  target_state_dict: Any,
  *,
  path: str,
  is_resuming: bool = False,
) -> dict[str, Any]:
  """Puts a draft model's checkpoint beside the target's, at `draft`.

  One of `RestoreCheckpointConfig.state_transformation_fns`.

  Args:
    state_dict: the target's checkpoint; if `is_resuming`, it has the draft
      model already.
    target_state_dict: the state that is to be filled.
    path: the draft model's checkpoint, in either of T5X's formats.
    is_resuming: given by T5X.

  Raises:
    ValueError: if `path` holds no checkpoint, or one of another network.
  """
  if is_resuming:
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
  target = {**state_dict['target'], DRAFT: draft}
  return {**state_dict, 'target': target}


def restore_with_draft(restore_checkpoint_cfg: Any, *, path: str) -> Any:
  """T5X's `RestoreCheckpointConfig` of the target, which also restores the
  draft model at `path`, as `load_draft` does.

  The transformations that it has already, `assignment_map` included, see the
  target alone, as they do without a draft model.
  """
  # dataclasses.replace would prepend the transformation of assignment_map to
  # those among which it is already.
  config = copy.copy(restore_checkpoint_cfg)
  config.state_transformation_fns = (
    *(
      functools.partial(_of_target_alone, transform)
      for transform in restore_checkpoint_cfg.state_transformation_fns
    ),
    functools.partial(load_draft, path=path),
  )
  return config


def _of_target_alone(
  transform: Callable[..., Any],
  state_dict: Any,
  target_state_dict: Any,
  **is_resuming: bool,
) -> Any:
  """A transformation's result, without the draft model in what it sees."""
  state_dict, draft = _parted(state_dict)
  target_state_dict, _ = _parted(target_state_dict)
  result = transform(state_dict, target_state_dict, **is_resuming)
  if not draft:
    return result
  return {**result, 'target': {**result['target'], **draft}}


def _parted(state_dict: Any) -> tuple[Any, dict[str, Any]]:
  """A state without its draft model, and the draft model by its name."""
  state_dict = flax.core.unfreeze(state_dict)
  target = dict(state_dict['target'])
  draft = {name: target.pop(name) for name in (DRAFT,) if name in target}
  return {**state_dict, 'target': target}, draft
