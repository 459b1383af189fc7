"""What an inference would take of every chip, from shapes alone."""

import contextlib
import dataclasses
import math
from collections.abc import Iterator

import jax
from jax.sharding import Mesh

from specdec_jax.infer import strategies
from specdec_jax.infer.decoding import Job
from specdec_jax.launch import failures, processes, progress
from specdec_jax.models import families
from specdec_jax.sharding import mesh as mesh_lib
from specdec_jax.text import prompts


@dataclasses.dataclass(frozen=True)
class Size:
  """What a tree of arrays takes: of all chips together, and of each."""

  values: int = 0
  bytes: int = 0
  bytes_per_chip: int = 0

  def __add__(self, other: 'Size') -> 'Size':
    return Size(**{k: v + getattr(other, k) for k, v in vars(self).items()})


def of(job: Job) -> dict[str, Size]:
  """Returns the sizes of a decode by what they are of, from shapes alone: a
  drafter's parameters without those that it shares. Raises ValueError if the
  model or the batch does not divide over the mesh."""
  mesh, batch_size = job.mesh, job.decoding.batch_size
  shapes = job.decoder.params
  mesh_lib.check_divides(mesh, shapes.target, batch_size=batch_size)
  # A prompt of one row, as if it had B of them.
  prompt = jax.tree.map(
    lambda row: jax.ShapeDtypeStruct((batch_size, *row.shape[1:]), row.dtype),
    prompts.pack(
      [None],
      config=job.decoder.config,
      width=job.inputs_length,
      max_new_tokens=job.targets_length,
    ),
  )
  init = strategies.of(job).init
  state = jax.eval_shape(lambda p, x: init(p, x, job), shapes, prompt)
  config = job.decoder.drafting.config
  # A drafter that shares the target's embeddings has only its own here.
  own = () if config is None else families.param_shapes(config)
  of_params = mesh_lib.parameter_shardings
  return {
    'target parameters': _size(shapes.target, of_params(mesh, shapes.target)),
    'drafter parameters': _size(own, mesh_lib.drafter_shardings(mesh, own)),
    'caches and state': _size(state, mesh_lib.state_shardings(mesh, state)),
  }


def _size(tree: object, shardings: object) -> Size:
  # An array that is split over 4 of 8 chips takes a quarter of itself on each.
  pairs = zip(jax.tree.leaves(tree), jax.tree.leaves(shardings), strict=True)
  sizes = [
    Size(
      leaf.size,
      leaf.size * leaf.dtype.itemsize,
      math.prod(sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize,
    )
    for leaf, sharding in pairs
  ]
  return sum(sizes, Size())


def _chip_bytes(mesh: Mesh) -> int | None:
  """Returns the memory of a device, None if it does not tell."""
  device = mesh.devices.flat[0]
  stats = device.memory_stats() if device.platform != 'cpu' else None
  return (stats or {}).get('bytes_limit')


def show(job: Job) -> int:
  """Prints the sizes as a table, once for all processes; 0."""
  from rich.table import Column, Table

  # Before anything is printed: this says what does not divide over the mesh.
  found, mesh = of(job), job.mesh
  axes = ' x '.join(f'{axis} {size}' for axis, size in mesh.shape.items())
  kind = mesh.devices.flat[0].device_kind
  names = ('values', 'bytes', 'bytes per chip')
  result = Table(
    '',
    *(Column(name, justify='right') for name in names),
    title=f'{mesh.size} x {kind}, {axes}, batch {job.decoding.batch_size}',
  )
  together = sum(found.values(), Size())
  for label, size in (found | {'together': together}).items():
    result.add_row(label, *(f'{value:,}' for value in vars(size).values()))
  if limit := _chip_bytes(mesh):
    result.add_row('memory of a chip', '', '', f'{limit:,}')
  if processes.is_first():
    progress.console().print(result)
  return 0


@contextlib.contextmanager
def running_out_explained(job: Job) -> Iterator[None]:
  """Raises ValueError with what takes how much if memory runs out."""
  try:
    yield
  except Exception as error:
    if not failures.is_out_of_memory(error):
      raise
    target, drafter, state = (x.bytes_per_chip for x in of(job).values())
    limit = _chip_bytes(job.mesh)
    has = f' of {limit:,}' if limit else ''
    raise ValueError(
      f'out of memory: of the bytes{has} that a device has, the weights take '
      f'{target + drafter:,} and the caches of Decoding.batch_size '
      f'{job.decoding.batch_size:,} take {state:,}, before what is computed: '
      'lower Decoding.batch_size or TASK_FEATURE_LENGTHS, or raise '
      'device_mesh.num_partitions'
    ) from error
