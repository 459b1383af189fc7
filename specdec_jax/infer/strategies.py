"""Strategies for examples: decoding in the refilled loop, beam search, and
scoring of targets, as bundles of functions.

`footprint` computes the memory of a job on every chip, from shapes alone.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from specdec_jax import lazy
from specdec_jax.assembly import decode_many, models
from specdec_jax.assembly.decoder import own_params
from specdec_jax.base import Arrays, Params, Prompt
from specdec_jax.decoding import exact_bits, scoring, speculative
from specdec_jax.decoding.program import Program
from specdec_jax.infer import examples, records
from specdec_jax.infer.decoding import WITH_SCORES, Job
from specdec_jax.infer.examples import Row
from specdec_jax.launch import processes, progress
from specdec_jax.sharding import mesh as mesh_lib
from specdec_jax.text import prompts

# A compiled function of the weights, rows, and a count of the batch's
# utilisation; it yields rows, in any order, with their outputs, which have
# `statistics`.
Decode = Callable[
  [Params, Sequence[Row], decode_many.Utilisation], Iterator[tuple[Row, Any]]
]


class Strategy(NamedTuple):
  """A strategy for examples.

  Attributes:
    init: makes the caches and the state, for their sizes.
    compile: compiles the programs, and runs them once.
    record: makes the line of an example from the outputs of its rows.
  """

  init: Callable[[Params, Prompt, Job], Arrays]
  compile: Callable[[Job, Params], Decode]
  record: Callable[[Row, Sequence[Any], Job], records.Record]


def of(job: Job) -> Strategy:
  """Returns the strategy of a job."""
  # `num_decodes` 1 is a search with one beam: T5X's default, and not greedy.
  if job.is_scored:
    return _SCORING
  if job.decoding.num_decodes is None:
    return _LOOP
  # Beams are an extra, which this module does without.
  return lazy.attribute('specdec_jax.infer.beams:BEAM_SEARCH')


def _compile_loop(job: Job, params: Params) -> Decode:
  pack = examples.packer(job.layout)
  empty = pack([None] * job.refill_size)
  # Calls always have one width: otherwise the last bits of a row would depend
  # on whether other rows have a draft, and so on the shard and on restarts.
  drafter = job.decoder.drafter._replace(may_abstain=False)
  program = Program(
    method=dataclasses.replace(job.decoder.method, drafter=drafter),
    params=params,
    prompt=empty,
    max_len=job.max_len,
    places=functools.partial(mesh_lib.state_shardings, job.mesh),
  )
  everywhere = NamedSharding(job.mesh, PartitionSpec())
  if job.decoder.recipe.exact_bits:
    rows = jax.device_put(
      pack([None] * job.decoding.batch_size), mesh_lib.batch_sharding(job.mesh)
    )
    method, target = program.method, params.target
    exact_bits.check(method, target, rows, max_len=job.max_len)
  programs = program.refill(job.decoding.batch_size, everywhere)
  decode_many.warm_up(programs, params, empty)

  return lambda params, rows, used: (
    (row, output)
    for row, output, _ in decode_many.decode(
      programs, params, job.decoding.seed, rows, pack=pack, utilisation=used
    )
  )


def _compile_scoring(job: Job, params: Params) -> Decode:
  pack, layout = examples.packer(job.layout), job.layout
  return compile_whole(
    job,
    params,
    lambda rows: (pack(rows), *examples.pack_targets(rows, layout)),
    functools.partial(scoring.score, target=job.decoder.target),
  )


def compile_whole(
  job: Job,
  params: Params,
  pack: Callable[[Sequence[Row | None]], tuple[Arrays, ...]],
  function: Callable[..., Any],
) -> Decode:
  """Compiles `function(params, *packed)` for batches that end together."""
  # Rows are split over the devices. Every process gets all results, since each
  # makes all lines of a chunk.
  batch = mesh_lib.batch_sharding(job.mesh)
  batch_size = job.decoding.batch_size

  @functools.partial(
    jax.jit, out_shardings=NamedSharding(job.mesh, PartitionSpec())
  )
  def run(params: Params, packed: tuple[Arrays, ...]) -> Arrays:
    packed = jax.lax.with_sharding_constraint(packed, batch)
    return function(params, *packed)

  compute = lambda params, rows: jax.device_get(run(params, pack(rows)))
  compute(params, [None] * batch_size)
  return lambda params, rows, utilisation: decode_many.decode_whole(
    functools.partial(compute, params),
    rows,
    batch_size=batch_size,
    utilisation=utilisation,
  )


_LOOP = Strategy(
  init=lambda params, prompt, job: speculative.init(
    params,
    jax.random.key(0),
    prompt,
    method=job.decoder.method,
    max_len=job.max_len,
  ),
  compile=_compile_loop,
  record=lambda row, outputs, job: records.of_samples(
    row, outputs, job.layout, with_scores=job.mode == WITH_SCORES
  ),
)
_SCORING = Strategy(
  init=lambda params, prompt, job: job.decoder.target.init(
    params.target, prompt, job.max_len
  ),
  compile=_compile_scoring,
  record=lambda row, outputs, job: records.of_score(
    row, outputs[0], job.layout
  ),
)


def footprint(job: Job) -> dict[str, np.ndarray]:
  """Returns numbers of values, bytes, and bytes per chip of parameters and
  caches, by name, from shapes alone. Parameters that the drafter shares count
  once. ValueError if the model or the batch does not divide over the mesh."""
  mesh, batch_size = job.mesh, job.decoding.batch_size
  shapes = job.decoder.shapes
  mesh_lib.check_divides(mesh, shapes.target, batch_size=batch_size)
  prompt = prompts.pack(
    [None] * batch_size,
    config=job.decoder.config,
    width=job.inputs_length,
    max_new_tokens=job.targets_length,
  )
  init = of(job).init
  state = jax.eval_shape(lambda p, x: init(p, x, job), shapes, prompt)
  # The parameters of the drafter, without those that it shares with the target.
  drafting = job.decoder.parts.drafting
  draft_shapes = own_params(shapes)
  if drafting.config is not None:
    draft_shapes = models.param_shapes(drafting.model, drafting.config)
  of_params = mesh_lib.parameter_shardings
  return {
    'target parameters': _size(shapes.target, of_params(mesh, shapes.target)),
    'drafter parameters': _size(
      draft_shapes, mesh_lib.drafter_shardings(mesh, draft_shapes)
    ),
    'caches and state': _size(state, mesh_lib.state_shardings(mesh, state)),
  }


def _size(tree: object, shardings: object) -> np.ndarray:
  num_values = sum(leaf.size for leaf in jax.tree.leaves(tree))
  # An array that is split over 4 chips takes a quarter of its bytes on each.
  placed = mesh_lib.with_shardings(tree, shardings)
  sizes = mesh_lib.tree_bytes(tree), mesh_lib.tree_bytes(placed)
  return np.array([num_values, *sizes])


def _chip_bytes(mesh: Mesh) -> int | None:
  """Returns the memory of a device; None if unknown."""
  device = mesh.local_devices[0]  # Only local devices have statistics.
  stats = device.memory_stats() if device.platform != 'cpu' else None
  return (stats or {}).get('bytes_limit')


def show_footprint(job: Job) -> int:
  """Prints the sizes as a table, once for all processes; returns 0."""
  from rich.table import Column, Table

  # Computed first: it raises if sizes do not divide over the mesh.
  sizes_by_name, mesh = footprint(job), job.mesh
  axes = ' x '.join(f'{axis} {size}' for axis, size in mesh.shape.items())
  device_kind = mesh.devices.flat[0].device_kind
  names = ('values', 'bytes', 'bytes per chip')
  result = Table(
    '',
    *(Column(name, justify='right') for name in names),
    title=f'{mesh.size} x {device_kind}, {axes}, '
    f'batch {job.decoding.batch_size}',
  )
  together = np.sum([*sizes_by_name.values()], axis=0)
  for label, sizes in (sizes_by_name | {'together': together}).items():
    result.add_row(label, *(f'{size:,}' for size in sizes))
  if limit := _chip_bytes(mesh):
    result.add_row('memory of a chip', '', '', f'{limit:,}')
  if processes.is_first():
    progress.console().print(result)
  return 0
