"""Costs on a TPU slice that need not be there, from its own compiler.

libtpu compiles for a topology without the hardware. What it compiled is then
priced by a roofline: `max(bytes / bandwidth, flops / peak)`, plus what each
instruction costs however little it does, plus collectives. Nothing is run.
"""

import contextlib
import dataclasses
import math
import re
import time
from collections.abc import Iterator, Sequence
from concurrent import futures
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.experimental.compilation_cache import compilation_cache
from jax.sharding import Mesh

from specdec_jax.decoding.program import Part
from specdec_jax.files.require import require
from specdec_jax.launch import platforms, progress
from specdec_jax.planning import hlo
from specdec_jax.planning.chips import CHIPS, Chip

# Compiled by itself, a step would prefetch a parameter, perhaps a whole table
# of embeddings, before it begins and again for the next run. No step of a loop
# does so.
_OPTIONS = {'xla_max_cross_program_prefetches': 0}
# The latency between neighbouring chips: an assumption, as nobody publishes it.
_HOP_SECONDS = 1e-6


@dataclasses.dataclass(frozen=True, kw_only=True)
class Slice:
  """A slice of TPUs to compile for, by its topology's name: its chips' figures,
  and a device per chip, of no use but for compiling."""

  name: str
  chip: Chip
  devices: tuple[Any, ...]


@dataclasses.dataclass(frozen=True, kw_only=True)
class ProgramCost:
  """What one run of a compiled program costs each chip.

  Attributes:
    memory_bytes: moved to and from main memory; loop bodies count as often as
      they run.
    flops: XLA's count; loop bodies count once.
    num_instructions: that run one after the other.
    num_collectives: that run.
    seconds: the roofline: the larger of the next two, and those after them.
    memory_seconds, flop_seconds: for bytes, and for arithmetic.
    launch_seconds, collective_seconds: for instructions as such, and for
      collectives.
    compiler_seconds: the compiler's own estimate of the cycles, as far as it
      made any; a second opinion.
    argument_bytes, temporary_bytes: of parameters and caches, and besides.
    compile_seconds: on this machine.
  """

  memory_bytes: float
  flops: float
  num_instructions: int
  num_collectives: int
  seconds: float
  memory_seconds: float
  flop_seconds: float
  launch_seconds: float
  collective_seconds: float
  compiler_seconds: float
  argument_bytes: int
  temporary_bytes: int
  compile_seconds: float


def find_slice(name: str) -> Slice:
  """Returns the slice of a topology such as `v4:1x1x1`, `v5e:2x4` or `v6e:2x2`;
  raises ValueError if there is none, ImportError if libtpu is not installed."""
  # A chip, and the chips along each axis of the slice.
  match = re.fullmatch(r'([a-z0-9]+):(\d+(?:x\d+){0,2})', name)
  chip = CHIPS.get(match[1]) if match else None
  sizes = [int(n) for n in match[2].split('x')] if match else []
  # A single chip may be written in any number of dimensions.
  if not chip or (len(sizes) != chip.num_dimensions and math.prod(sizes) != 1):
    raise ValueError(
      f'no topology is called {name!r}: write a chip, {", ".join(CHIPS)}, and '
      'its shape, such as v4:2x2x1 or v5e:2x4'
    )
  require('libtpu', extra='tpu', purpose='the TPU compiler')
  platforms.answer_libtpu()
  from jax.experimental import topologies

  # Of `v5e:1x1`, less than a host, libtpu wants to know the host's shape.
  options: dict[str, Any] = {}
  if chip.name == 'v4':  # One device per chip, not per core.
    options['chip_config_name'] = 'megacore'
  if any(size % 2 for size in sizes[:2]):  # Less than a host's 2x2.
    options['chips_per_host_bounds'] = (sizes + [1, 1])[:3]
  try:
    topology = topologies.get_topology_desc(
      platform='tpu', topology_name=name, **options
    )
  except Exception as error:
    reason = str(error).splitlines()[0]
    raise ValueError(f'no topology is called {name!r}: {reason}') from error
  return Slice(name=name, chip=chip, devices=tuple(topology.devices))


_Compiled = tuple[Any, float]  # A program, and the seconds it took.


class Job(NamedTuple):
  """A program to compile, of shapes whose shardings name the devices; `mesh` is
  set while it is traced."""

  part: Part
  mesh: Mesh | None


def compile_all(jobs: Sequence[Job]) -> list[_Compiled]:
  """Compiles the jobs, two at a time, and shows a bar meanwhile; returns each
  with the seconds that it took. Raises ValueError if one does not fit in the
  memory of its devices."""
  return progress.interruptible(lambda: _compile_all(jobs))


def _compile_all(jobs: Sequence[Job]) -> list[_Compiled]:
  def finish(lowered: Any) -> _Compiled:
    started = time.perf_counter()
    compiled = lowered.compile(compiler_options=_OPTIONS)
    return compiled, time.perf_counter() - started

  # Tracing takes Python's lock; compiling does not, and two fit in memory.
  with (
    _without_cache(),
    progress.bar('compiling', len(jobs)) as bar,
    futures.ThreadPoolExecutor(2) as pool,
  ):
    pending = []
    # Sharding rules read the mesh that is set while a function is traced.
    for job in jobs:
      with jax.set_mesh(job.mesh) if job.mesh else contextlib.nullcontext():
        pending.append(pool.submit(finish, job.part.lower()))
    results = []
    try:
      for each in pending:
        results.append(each.result())
        bar.advance(1)
    except jax.errors.JaxRuntimeError as error:
      for each in pending:
        each.cancel()
      if 'RESOURCE_EXHAUSTED' not in str(error):
        raise
      # libtpu says `Used 45.1G of 31.2G hbm`.
      found = re.search(r'Used ([\d.]+\w) of ([\d.]+\w) hbm', str(error))
      used = f': {found[1]} of {found[2]}' if found else ''
      raise ValueError(
        f'the program does not fit in the memory of a chip{used}'
      ) from error
  return results


@contextlib.contextmanager
def _without_cache() -> Iterator[None]:
  """Keeps programs for another machine out of this one's persistent cache."""
  name = 'jax_enable_compilation_cache'
  before = getattr(jax.config, name)
  jax.config.update(name, False)
  compilation_cache.reset_cache()  # Else jax goes on as it once began.
  try:
    yield
  finally:
    jax.config.update(name, before)
    compilation_cache.reset_cache()


def price(
  programs: Sequence[_Compiled],
  chip: Chip,
  context: float = math.inf,
) -> list[ProgramCost]:
  """Prices programs together: one cost per instruction, the cheapest found in
  any of them, serves all.

  Args:
    programs: of `compile_all`.
    chip: what they run on.
    context: entries of a cache that its longest row fills; infinity for all.
  """
  costs = [hlo.Program(each.as_text(), context).cost() for each, _ in programs]
  # The compiler's estimate for the smallest instructions of any program: their
  # cheapest tenth, as dearer ones wait for memory or multiply.
  small = [cycles for cost in costs for cycles in cost.small_cycles]
  launch = float(np.percentile(small, 10)) / chip.clock if small else 0.0

  def priced(
    compiled: Any, compile_seconds: float, cost: hlo.Cost
  ) -> ProgramCost:
    memory = compiled.memory_analysis()
    flops = float((compiled.cost_analysis() or {}).get('flops', 0.0))
    memory_seconds = cost.memory_bytes / chip.memory_bandwidth
    flop_seconds = flops / chip.peak_flops
    launch_seconds = cost.num_instructions * launch
    collective_seconds = sum(
      each.sent_bytes / chip.link_bandwidth + each.num_hops * _HOP_SECONDS
      for each in cost.collectives
    )
    # Memory and arithmetic overlap: the longer one is what it takes.
    overlapped = max(memory_seconds, flop_seconds)
    return ProgramCost(
      memory_bytes=cost.memory_bytes,
      flops=flops,
      num_instructions=int(cost.num_instructions),
      num_collectives=len(cost.collectives),
      seconds=overlapped + launch_seconds + collective_seconds,
      memory_seconds=memory_seconds,
      flop_seconds=flop_seconds,
      launch_seconds=launch_seconds,
      collective_seconds=collective_seconds,
      compiler_seconds=cost.cycles / chip.clock,
      argument_bytes=memory.argument_size_in_bytes,
      temporary_bytes=memory.temp_size_in_bytes,
      compile_seconds=compile_seconds,
    )

  return [
    priced(*program, cost)
    for program, cost in zip(programs, costs, strict=True)
  ]
