"""T5X checkpoints, in T5X's own format (`legacy`) and in Orbax's."""

from specdec_jax.checkpoints.t5x.folder import (
  find,
  is_checkpoint,
  layout_of,
  read_config,
  read_step,
  read_target,
  write_target,
)

__all__ = [
  'find',
  'is_checkpoint',
  'layout_of',
  'read_config',
  'read_step',
  'read_target',
  'write_target',
]
