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
  """This process's rows of a batch as their part of global arrays."""
  mesh = jax.sharding.get_mesh()
  if mesh.empty:
    return {name: jnp.asarray(x) for name, x in batch.items()}
  sharding = meshes.batch_sharding(mesh)
  return {
    name: jax.make_array_from_process_local_data(sharding, x)
    for name, x in batch.items()
  }


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
