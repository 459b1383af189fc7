"""Meshes of Tunix's models, and sharding over them."""

import dataclasses
import math
from typing import Any

import jax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from specdec_jax.assembly.decoder import Decoder
from specdec_jax.base import Array
from specdec_jax.sharding import rules


def of(model: Any) -> Mesh:
  """Returns a mesh of the devices of a Tunix model, in their order.

  Its axis `model` is the one that splits the feed-forward layers, Tunix's `tp`;
  `data` joins the axes before it, such as `fsdp`, or those after it if they
  have more devices.
  """
  sharding = model.layers[0].mlp.gate_proj.kernel.get_value().sharding
  if not isinstance(sharding, NamedSharding):
    mesh = Mesh([*sharding.device_set], 'devices')
    sharding = NamedSharding(mesh, PartitionSpec())
  devices = sharding.mesh.devices
  shape = devices.size, 1, 1
  # The kernel is [embed, mlp].
  mlp_axis = (*sharding.spec, None, None)[1]
  if isinstance(mlp_axis, str):
    i = sharding.mesh.axis_names.index(mlp_axis)
    before, after = devices.shape[:i], devices.shape[i + 1 :]
    shape = math.prod(before), devices.shape[i], math.prod(after)
  # Axes (dp, fsdp, tp) of 2 x 2 x 2 devices become (data, model) of 4 x 2.
  names = [rules.DATA, rules.MODEL, 'rest']
  if shape[2] > shape[0]:
    names.reverse()
  return Mesh(devices.reshape(shape), names, axis_types=(AxisType.Auto,) * 3)


def replicated(mesh: Mesh) -> NamedSharding:
  """Returns the sharding that replicates arrays on all devices."""
  return NamedSharding(mesh, PartitionSpec())


def placed(decoder: Decoder, mesh: Mesh) -> Decoder:
  """Replicates the parameters that have no mesh, or are not on all devices of
  this one."""
  devices = {*mesh.devices.flat}

  def place(x: object) -> Array:
    # jit compiles again for an array without a mesh, even on one device. To
    # place an array where it already is copies nothing.
    if (
      isinstance(x, jax.Array)
      and isinstance(x.sharding, NamedSharding)
      and x.sharding.device_set == devices
    ):
      return x
    return jax.device_put(x, replicated(mesh))

  params = jax.tree.map(place, decoder.params)
  return dataclasses.replace(decoder, params=params)
