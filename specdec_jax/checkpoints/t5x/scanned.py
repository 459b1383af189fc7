"""Checkpoints with stacked layers, as T5X's scalable_t5 writes (`scan_layers`).

`encoder/encoder` and `decoder/decoder` hold the parameters of our `layers_0`,
`layers_1` and so on, stacked along axis 1. Kernels have separate axes for heads
and their features: `[embed, layers, heads, kv]`, and for `out` `[heads, layers,
kv, embed]`.
"""

import itertools
import re
from collections.abc import Iterable

import jax
import numpy as np
from flax import traverse_util
from jax.sharding import NamedSharding, PartitionSpec

from specdec_jax.checkpoints import stored_arrays
from specdec_jax.models.products import Weights

_LAYER = re.compile(r'(encoder|decoder)/layers_(\d+)/(.+)')
_STACKS = ('encoder/encoder/', 'decoder/decoder/')
# The axis of a layer's kernel that joins heads and their features.
_JOINED = {'query': 1, 'key': 1, 'value': 1, 'out': 0}


def is_scanned(names: Iterable[str]) -> bool:
  """Tells whether arrays of these names hold stacked layers."""
  return any(name.startswith(_STACKS) for name in names)


def stacked_shapes(expected: Weights) -> Weights:
  """Returns the shapes, with shardings, in which the leaves of our tree are
  stored stacked. Raises ValueError for layers without a table of relative
  positions, whose shape states the number of heads."""
  shapes = {}
  for name, leaves in _grouped(expected).items():
    leaf = next(iter(leaves.values()))
    if not name.startswith(_STACKS):
      shapes[name] = leaf
      continue
    # With 12 layers and 8 heads of 64, a kernel `query` of [512, 512] is stored
    # as [512, 12, 8, 64], and `out` as [8, 12, 64, 512]: each axis of a layer
    # becomes a list of axes, and the axis of the layers comes second.
    axes = [[size] for size in leaf.shape]
    spec: tuple = ()
    if sharding := getattr(leaf, 'sharding', None):
      spec = tuple(sharding.spec)
    spec_axes = [[name] for name in (*spec, *[None] * leaf.ndim)[: leaf.ndim]]
    *_, branch, leaf_name = name.split('/')
    joined = _JOINED.get(branch) if leaf_name == 'kernel' else None
    if joined is not None:
      heads = _num_heads(expected, name)
      axes[joined] = [heads, leaf.shape[joined] // heads]
      spec_axes[joined].append(None)
    shape = _with_layers(axes, len(leaves))
    if sharding is not None:
      sizes = dict(sharding.mesh.shape)
      # An axis is replicated if its mesh axis no longer divides it.
      mesh_axes = [
        axis if axis is None or size % sizes[axis] == 0 else None
        for axis, size in zip(_with_layers(spec_axes, None), shape, strict=True)
      ]
      sharding = NamedSharding(sharding.mesh, PartitionSpec(*mesh_axes))
    shapes[name] = jax.ShapeDtypeStruct(shape, leaf.dtype, sharding=sharding)
  return shapes


def _with_layers(axes: list[list], layers: int | None) -> tuple:
  """Returns axes in order, with that of the layers second."""
  first, *rest = itertools.chain.from_iterable(axes)
  return first, layers, *rest


def unstack(stacked: Weights, expected: Weights) -> Weights:
  """Returns our tree of arrays stored as `stacked_shapes` describes; removes
  each array from `stacked` once it is split, to free its memory."""
  by_name = {}
  for name, leaves in _grouped(expected).items():
    array = stacked.pop(name)
    if not name.startswith(_STACKS):
      by_name[name] = array
      continue
    shardings = [getattr(leaf, 'sharding', None) for leaf in leaves.values()]
    shape = next(iter(leaves.values())).shape
    # One program per array: each layer's slice, with the layer's sharding.
    take = jax.jit(
      lambda array, shape=shape, count=len(leaves): [
        array[:, i].reshape(shape) for i in range(count)
      ],
      out_shardings=None if None in shardings else shardings,
    )
    by_name |= dict(zip(leaves, take(array), strict=True))
  return traverse_util.unflatten_dict(by_name, sep='/')


def stack(params: Weights) -> Weights:
  """Stacks a tree of numpy arrays; raises ValueError as `stacked_shapes`."""
  leaves = stored_arrays.flatten(params)
  shapes = stacked_shapes(leaves)
  by_name = {}
  for name, layers in _grouped(leaves).items():
    values = list(layers.values())
    if name.startswith(_STACKS):
      first, _, *rest = shapes[name].shape
      arrays = [np.asarray(value).reshape(first, *rest) for value in values]
      by_name[name] = np.stack(arrays, axis=1)
    else:
      (by_name[name],) = values
  return traverse_util.unflatten_dict(by_name, sep='/')


def _grouped(leaves: Weights) -> dict[str, Weights]:
  """Groups leaves under the name of the array that stores them, in the order of
  layers."""
  groups: dict[str, Weights] = {}
  number = lambda match: int(match[2]) if match else 0
  by_layer = sorted(leaves, key=lambda x: (number(_LAYER.fullmatch(x)), x))
  for name in by_layer:
    # `decoder/layers_3/mlp/wo/kernel` is a part of `decoder/decoder/mlp/wo/
    # kernel`; what is outside of layers is stored by its own name.
    stored = name
    if match := _LAYER.fullmatch(name):
      stored = f'{match[1]}/{match[1]}/{match[3]}'
    groups.setdefault(stored, {})[name] = leaves[name]
  return groups


def _num_heads(leaves: Weights, name: str) -> int:
  table = leaves.get(f'{name.split("/")[0]}/layers_0/relpos_bias/rel_embedding')
  if table is None:
    raise ValueError(
      'the layers are stacked, as in scalable_t5: use its sizes, such as '
      'scalable_t5_1_1_small, or set has_layer_relpos in model.json'
    )
  return table.shape[0]
