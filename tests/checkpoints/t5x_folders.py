"""Checkpoints that T5X wrote, and changes of them."""

from flax import serialization, traverse_util

from specdec_jax.checkpoints import stored_arrays, t5x
from specdec_jax.checkpoints.t5x import legacy as t5x_legacy

FORMATS = ('legacy', 'orbax')
KERNEL = 'decoder/layers_0/mlp/wi_0/kernel'


def described(path):
  """Shape and dtype of every parameter by name, none of them read."""
  arrays = t5x.open_target(t5x.find(path))
  return {name: stored_arrays.describe(each) for name, each in arrays.items()}


def rewrite_specs(folder, change) -> None:
  """Applies `change(name, spec)` to every spec of a legacy checkpoint."""
  path = folder / 'checkpoint'
  contents = serialization.msgpack_restore(path.read_bytes())
  target = t5x_legacy._leaves(contents['optimizer']['target'])
  changed = {name: change(name, spec) for name, spec in target.items()}
  contents['optimizer']['target'] = traverse_util.unflatten_dict(
    changed, sep='/'
  )
  path.write_bytes(serialization.msgpack_serialize(contents))
