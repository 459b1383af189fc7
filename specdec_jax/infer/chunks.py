"""Chunks of examples, which a restart does not repeat: how they are read, the
same in all processes, and decoded."""

import contextlib
import dataclasses
import functools
import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import numpy as np

from specdec_jax.assembly import decode_many
from specdec_jax.assembly import decoder as decoder_lib
from specdec_jax.base import Params
from specdec_jax.decoding import rates
from specdec_jax.drafters import Pool, text_pool
from specdec_jax.infer import examples, strategies
from specdec_jax.infer.decoding import Job
from specdec_jax.infer.examples import Row
from specdec_jax.infer.records import Record
from specdec_jax.launch import agreement, processes, progress
from specdec_jax.sharding import mesh as mesh_lib


@dataclasses.dataclass(frozen=True)
class Chunk:
  """Consecutive examples, and their digest, see `examples.digest`."""

  index: int
  rows: tuple[Row, ...]
  digest: str


def read(rows: Iterator[Row], size: int) -> Iterator[Chunk]:
  """Yields rows in chunks; raises unless all processes have the same."""
  for index in itertools.count():
    chunk = tuple(itertools.islice(rows, size))
    digest = examples.digest(chunk)
    agreement.check_everywhere(
      {f'digest of the examples in chunk {index}': digest}
    )
    if not chunk:
      return
    yield Chunk(index=index, rows=chunk, digest=digest)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Loaded:
  """A job with its weights, on the mesh.

  Attributes:
    job: what is decoded; its gamma is a number once it is compiled.
    params: the weights of target and drafter.
    decode_rows: the compiled job; None until `compiled`.
  """

  job: Job
  params: Params
  decode_rows: strategies.Decode | None = None

  def at(self, gamma: int) -> 'Loaded':
    """Returns the job with a gamma: for 0 without the drafter's weights."""
    params = self.params if gamma else Params(target=self.params.target)
    return Loaded(job=self.job.at(gamma), params=params)

  def compiled(self) -> 'Loaded':
    """Returns the job with its program."""
    with progress.waiting('compiling'):
      program = strategies.of(self.job).compile(self.job, self.params)
    return dataclasses.replace(self, decode_rows=program)

  def with_pool(self, tokens: np.ndarray) -> 'Loaded':
    """Returns it with other texts to copy from: those of the first process."""
    if not isinstance(self.params.drafter, Pool):
      return self
    pool = text_pool.of_tokens(processes.array_of_first(tokens))
    return dataclasses.replace(self, params=self.params._replace(drafter=pool))


def load(job: Job) -> Loaded:
  """Reads the weights onto the mesh; raises if they do not divide over it."""
  target, mesh = job.decoder.params.target, job.mesh
  mesh_lib.check_divides(mesh, target, batch_size=job.decoding.batch_size)
  with progress.waiting(f'loading {job.decoder.model.checkpoint}'):
    decoder = decoder_lib.load(
      job.decoder,
      target_shardings=functools.partial(mesh_lib.parameter_shardings, mesh),
      drafter_shardings=functools.partial(mesh_lib.drafter_shardings, mesh),
    )
  return Loaded(job=job, params=decoder.params)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Decoded:
  """The lines of a chunk, in order, and its time."""

  lines: list[Record]
  timed: decode_many.Timed


def decode(
  loaded: Loaded, rows: Sequence[Row], *, profile_dir: str | None = None
) -> Decoded:
  """Decodes the examples of a chunk."""
  job = loaded.job
  num_samples = job.decoding.num_samples
  with contextlib.ExitStack() as stack:
    # The program is compiled by now, and stays out of the trace.
    if profile_dir is not None:
      stack.enter_context(jax.profiler.trace(profile_dir))
    bar = stack.enter_context(progress.bar('decoding', len(rows) * num_samples))
    sampled = examples.sampled(rows, num_samples)
    outputs, timed = decode_rows(loaded, sampled, advance=bar.advance)
  # With S samples, row i is decoded as rows i S .. i S + S - 1.
  record = strategies.of(job).record
  lines = []
  for row in rows:
    indices = range(row.index * num_samples, (row.index + 1) * num_samples)
    lines.append(record(row, [outputs[i] for i in indices], job))
  return Decoded(lines=lines, timed=timed)


def decode_rows(
  loaded: Loaded,
  rows: Sequence[Row],
  *,
  advance: Callable[[int], None] = lambda num_rows: None,
) -> tuple[dict[int, Any], decode_many.Timed]:
  """Decodes rows with a compiled job: outputs by index, and how long it took.

  `advance` is called with the number of rows that are done.
  """
  assert loaded.decode_rows is not None
  used = decode_many.Utilisation(num_rows=loaded.job.decoding.batch_size)
  outputs: dict[int, Any] = {}
  started = time.perf_counter()
  for row, output in loaded.decode_rows(loaded.params, rows, used):
    outputs[row.index] = output
    advance(1)
  seconds = time.perf_counter() - started
  statistics = rates.joined([outputs[row.index].statistics for row in rows])
  return outputs, decode_many.Timed(statistics, used, seconds)
