"""Meshes of Tunix's models, and how this package uses them."""

import dataclasses
import math
from typing import Any

import jax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from specdec_jax.assembly.decoder import Decoder
from specdec_jax.base import Array
from specdec_jax.sharding import rules


def of(model: Any) -> Mesh:
  """Makes a mesh of the devices that a Tunix model lies on, in their order.

  `model` is the axis that splits the model's feed-forward, Tunix's `tp`, and
  `data` all axes before it, such as `fsdp`, or behind it if those are more.
  """
  place = model.layers[0].mlp.gate_proj.kernel.get_value().sharding
  if not isinstance(place, NamedSharding):
    place = NamedSharding(Mesh([*place.device_set], 'devices'), PartitionSpec())
  devices = place.mesh.devices
  shape = devices.size, 1, 1
  # The kernel is [embed, mlp].
  if isinstance(axis := (*place.spec, None, None)[1], str):
    i = place.mesh.axis_names.index(axis)
    before, behind = devices.shape[:i], devices.shape[i + 1 :]
    shape = math.prod(before), devices.shape[i], math.prod(behind)
  # Axes (dp, fsdp, tp) of 2 x 2 x 2 devices become (data, model) of 4 x 2.
  names = [rules.DATA, rules.MODEL, 'rest']
  if shape[2] > shape[0]:
    names.reverse()
  return Mesh(devices.reshape(shape), names, axis_types=(AxisType.Auto,) * 3)


def everywhere(mesh: Mesh) -> NamedSharding:
  """Makes the sharding of arrays that each device has whole."""
  return NamedSharding(mesh, PartitionSpec())


def placed(decoder: Decoder, mesh: Mesh) -> Decoder:
  """Puts whole on each device what has no mesh or does not lie on all devices
  of this one."""
  devices = {*mesh.devices.flat}

  def place(x: object) -> Array:
    # Without a mesh, an array is of another type, on one device too, for which
    # all would be compiled again. To put it where it is copies nothing.
    if (
      isinstance(x, jax.Array)
      and isinstance(x.sharding, NamedSharding)
      and x.sharding.device_set == devices
    ):
      return x
    return jax.device_put(x, everywhere(mesh))

  params = jax.tree.map(place, decoder.params)
  return dataclasses.replace(decoder, params=params)
