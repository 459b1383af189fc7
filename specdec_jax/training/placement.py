"""Where a run's arrays lie on the mesh that is set, if any.

Without a mesh (`jax.set_mesh`) everything stays where it is.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from specdec_jax.base import Array
from specdec_jax.sharding import mesh as meshes
from specdec_jax.training.run_checkpoints import Run


def place_batch(batch: Mapping[str, np.ndarray]) -> dict[str, Array]:
  """A batch as global arrays, split over the `data` axis of the mesh.

  Every process gives the whole batch, and each of its devices takes the rows of
  its own place on the mesh: devices that share a copy of the model take the
  same rows, even where they belong to different processes.

  Args:
    batch: features of all rows, `[B, ...]`.

  Raises:
    ValueError: if the rows do not divide over the data-parallel devices.
  """
  mesh = jax.sharding.get_mesh()
  if mesh.empty:
    return {name: jnp.asarray(x) for name, x in batch.items()}
  sharding = meshes.batch_sharding(mesh)
  placed: dict[str, Array] = {}
  for name, x in batch.items():
    meshes.check_divides(mesh, {}, batch_size=len(x))
    placed[name] = jax.make_array_from_callback(
      x.shape, sharding, x.__getitem__
    )
  return placed


def fetch(arrays: Any) -> Any:
  """A tree of arrays in numpy, whole in every process."""

  def whole(x: Array) -> np.ndarray:
    if x.is_fully_addressable:
      return np.asarray(x)
    from jax.experimental import multihost_utils

    return multihost_utils.process_allgather(x, tiled=True)

  return jax.tree.map(whole, arrays)


def place_run(run: Run, optimizer: Any) -> Run:
  """A run over the mesh: parameters as `sharding.rules` says, the optimiser's
  arrays of the same shapes beside them, everything else whole on every device.
  """
  mesh = jax.sharding.get_mesh()
  if mesh.empty:
    return run
  import optax

  params = run.state.params
  shardings = meshes.parameter_shardings(mesh, params)
  whole = NamedSharding(mesh, PartitionSpec())
  opt_state = optax.tree_utils.tree_map_params(
    optimizer,
    lambda x, param, sharding: jax.device_put(
      x, sharding if x.shape == param.shape else whole
    ),
    run.state.opt_state,
    params,
    shardings,
    transform_non_params=lambda x: jax.device_put(x, whole),
  )
  state = dataclasses.replace(
    run.state,
    step=jax.device_put(run.state.step, whole),
    params=jax.tree.map(jax.device_put, params, shardings),
    opt_state=opt_state,
  )
  return dataclasses.replace(
    run,
    state=state,
    position=jax.device_put(run.position, whole),
    rng_key=jax.device_put(run.rng_key, whole),
  )
