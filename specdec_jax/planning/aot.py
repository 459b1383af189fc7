"""Predicts costs on a TPU slice with the TPU compiler, without the hardware.

libtpu compiles for a topology that need not exist. The compiled program is
priced by a roofline: `max(bytes / bandwidth, flops / peak)`, plus a constant
per instruction, plus collectives. Nothing is run.
"""

import contextlib
import dataclasses
import functools
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
from specdec_jax.planning.trip_counts import trip_count

# A step that is compiled alone would prefetch a parameter, perhaps a whole
# table of embeddings, before it begins and for the next run; steps of a loop do
# not.
_OPTIONS = {'xla_max_cross_program_prefetches': 0}
# The latency between neighbouring chips: an assumption, since it is not
# published.
_HOP_SECONDS = 1e-6


@dataclasses.dataclass(frozen=True, kw_only=True)
class Slice:
  """A slice of TPUs to compile for: the name of its topology, the figures of
  its chips, and a device per chip, which can only be compiled for."""

  name: str
  chip: Chip
  devices: tuple[Any, ...]


@dataclasses.dataclass(frozen=True, kw_only=True)
class ProgramCost:
  """The cost of one run of a compiled program on each chip.

  Attributes:
    memory_bytes: moved to and from main memory; loop bodies count as often as
      they run.
    flops: XLA's count; loop bodies count once.
    num_instructions: instructions that run one after the other.
    num_collectives: collectives that run.
    seconds: the roofline: the larger of `memory_seconds` and `flop_seconds`,
      plus `launch_seconds` and `collective_seconds`.
    memory_seconds, flop_seconds: for bytes, and for arithmetic.
    launch_seconds, collective_seconds: the constant cost of instructions, and
      that of collectives.
    compiler_seconds: the compiler's estimate of cycles, for comparison; parts
      of a program may have none.
    argument_bytes, temporary_bytes: of parameters and caches, and of
      temporaries.
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
  # Parse the name: a chip, and the number of chips along each axis.
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

  # Options of libtpu: a device of v4 is a chip, not a core; and of a slice that
  # is smaller than a host's 2x2, such as `v5e:1x1`, it needs the host's shape.
  options: dict[str, Any] = {}
  if chip.name == 'v4':
    options['chip_config_name'] = 'megacore'
  if any(size % 2 for size in sizes[:2]):
    options['chips_per_host_bounds'] = (sizes + [1, 1])[:3]
  # Make the topology.
  try:
    topology = topologies.get_topology_desc(
      platform='tpu', topology_name=name, **options
    )
  except Exception as error:
    reason = str(error).splitlines()[0]
    raise ValueError(f'no topology is called {name!r}: {reason}') from error
  return Slice(name=name, chip=chip, devices=tuple(topology.devices))


# A compiled program, and the seconds that compiling took.
_Compiled = tuple[Any, float]


class Job(NamedTuple):
  """A program to compile: a part whose shapes have shardings, and the mesh that
  is set while it is traced."""

  part: Part
  mesh: Mesh | None


def compile_all(jobs: Sequence[Job]) -> list[_Compiled]:
  """Compiles jobs, two at a time, with a progress bar; returns each program and
  its compile seconds. ValueError if one does not fit in a chip's memory."""
  return progress.interruptible(lambda: _compile_all(jobs))


def _compile_all(jobs: Sequence[Job]) -> list[_Compiled]:
  def finish(lowered: Any) -> _Compiled:
    started = time.perf_counter()
    compiled = lowered.compile(compiler_options=_OPTIONS)
    return compiled, time.perf_counter() - started

  # Tracing holds Python's lock; compiling does not, and two fit in memory.
  with (
    _without_cache(),
    progress.bar('compiling', len(jobs)) as bar,
    futures.ThreadPoolExecutor(2) as pool,
  ):
    # Trace here; sharding rules read the mesh that is set meanwhile.
    pending = []
    for job in jobs:
      with jax.set_mesh(job.mesh) if job.mesh else contextlib.nullcontext():
        pending.append(pool.submit(finish, job.part.lower()))
    # Wait for the compiler.
    results = []
    try:
      for future in pending:
        results.append(future.result())
        bar.advance(1)
    except jax.errors.JaxRuntimeError as error:
      for future in pending:
        future.cancel()
      if 'RESOURCE_EXHAUSTED' not in str(error):
        raise
      # libtpu says `Used 45.1G of 31.2G hbm`.
      used_memory = re.search(r'Used ([\d.]+\w) of ([\d.]+\w) hbm', str(error))
      used = f': {used_memory[1]} of {used_memory[2]}' if used_memory else ''
      raise ValueError(
        f'the program does not fit in the memory of a chip{used}'
      ) from error
  return results


@contextlib.contextmanager
def _without_cache() -> Iterator[None]:
  """Disables the persistent cache, which is for programs of this machine."""
  name = 'jax_enable_compilation_cache'
  before = getattr(jax.config, name)
  jax.config.update(name, False)
  compilation_cache.reset_cache()  # jax reads the setting only once.
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
  """Prices programs, with one constant cost per instruction for all of them.

  Args:
    programs: of `compile_all`.
    chip: what they run on.
    context: entries of a cache that the longest row fills; infinity for all.
  """
  count_fn = functools.partial(trip_count, context=context)
  costs = [
    hlo.Program(compiled.as_text(), count_fn).cost() for compiled, _ in programs
  ]
  # The constant: the compiler's estimate for the smallest instructions, at
  # their tenth percentile, since others wait for memory or multiply.
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
      collective.sent_bytes / chip.link_bandwidth
      + collective.num_hops * _HOP_SECONDS
      for collective in cost.collectives
    )
    # Memory and arithmetic overlap: the longer one counts.
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
