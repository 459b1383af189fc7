"""Chunks of examples, which a restart does not repeat: how they are read, the
same in all processes, and decoded."""

import contextlib
import dataclasses
import functools
import itertools
import time
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import jax
import numpy as np

from specdec_jax.assembly import decoder as decoder_lib
from specdec_jax.base import Params
from specdec_jax.data import text_pool
from specdec_jax.infer import decode_many, examples, strategies
from specdec_jax.infer.decoding import Job
from specdec_jax.infer.gammas import Gammas
from specdec_jax.infer.records import Record
from specdec_jax.launch import agreement, processes, progress
from specdec_jax.measure import metrics, trials
from specdec_jax.sharding import mesh as mesh_lib
from specdec_jax.theory.gamma_trials import ChosenGamma


@dataclasses.dataclass(frozen=True, kw_only=True)
class Chunk:
  """Some examples in a row, and their digest, see `examples.digest`."""

  index: int
  rows: tuple[examples.Row, ...]
  digest: str


def read(rows: Iterator[examples.Row], sizes: Iterable[int]) -> Iterator[Chunk]:
  """Yields rows in chunks; raises unless all processes have the same."""
  for index, size in enumerate(sizes):
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
  """A job with its weights, and programs by gamma; None for its own."""

  job: Job
  params: Params
  programs: dict[int | None, strategies.Decode]

  def params_of(self, gamma: int | None) -> Params:
    """Returns the weights of a gamma: for 0 without the drafter's."""
    return Params(target=self.params.target) if gamma == 0 else self.params

  def with_pool(self, tokens: np.ndarray) -> 'Loaded':
    """Returns it with other texts to copy from: those of the first process."""
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
  return Loaded(job=job, params=decoder.params, programs={})


def compile_for(loaded: Loaded, gamma: int | None) -> strategies.Decode:
  """Returns the program of a gamma, compiled if it was not yet."""
  if gamma not in loaded.programs:
    with progress.waiting('compiling'):
      job, params = loaded.job.at(gamma), loaded.params_of(gamma)
      loaded.programs[gamma] = strategies.of(job).compile(job, params)
  return loaded.programs[gamma]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Decoded:
  """The lines of a chunk, in order, and the time of each of its parts; and the
  gamma of the rest of it, and of all that follow."""

  lines: list[Record]
  parts: list[decode_many.Timed]
  choice: ChosenGamma | None

  @property
  def timed(self) -> decode_many.Timed:
    return decode_many.together(self.parts)


def decode(
  loaded: Loaded,
  rows: Sequence[examples.Row],
  gammas: Gammas,
  *,
  profile_dir: str | None = None,
) -> Decoded:
  """Decodes the examples of a chunk, the first of them in turns if there is a
  gamma to choose."""
  job, left = loaded.job, list(rows)
  num_samples = job.decoding.num_samples
  outputs: dict[int, Any] = {}
  parts: list[decode_many.Timed] = []

  def decode_next(gamma: int | None, size: int) -> list[trials.Visit]:
    part = examples.sampled(left[:size], num_samples)
    del left[:size]
    found, timed, visit = _decode_part(loaded, part, gamma, bar)
    outputs.update(found)
    parts.append(timed)
    return [visit]

  with contextlib.ExitStack() as stack:
    # Programs are compiled by now, so that a trace has none of that.
    if profile_dir is not None:
      stack.enter_context(jax.profiler.trace(profile_dir))
    bar = stack.enter_context(progress.bar('decoding', len(rows) * num_samples))
    choice = gammas.choose(lambda gamma: decode_next(gamma, gammas.turn))
    chosen = None if choice is None else choice.gamma
    # Programs take memory: those of gammas that lost are dropped.
    for gamma in {*loaded.programs} - {chosen}:
      del loaded.programs[gamma]
    if left:
      decode_next(chosen, len(left))
  # Row i of S samples is decoded as rows i S .. i S + S - 1.
  record = strategies.of(job).record
  of_row = lambda row: [
    outputs[sample.index] for sample in examples.sampled([row], num_samples)
  ]
  lines = [record(row, of_row(row), job) for row in rows]
  return Decoded(lines=lines, parts=parts, choice=choice)


def _decode_part(
  loaded: Loaded,
  part: Sequence[examples.Row],
  gamma: int | None,
  bar: progress.Bar,
) -> tuple[dict[int, Any], decode_many.Timed, trials.Visit]:
  """Decodes rows with one gamma: their outputs by index, and the times."""
  began = time.perf_counter()
  with bar.hidden():  # A terminal shows one thing at a time.
    decode_rows = compile_for(loaded, gamma)
  params = loaded.params_of(gamma)
  used = decode_many.Utilisation(num_rows=loaded.job.decoding.batch_size)
  outputs, started = {}, time.perf_counter()
  for row, output in decode_rows(params, part, used):
    outputs[row.index] = output
    bar.advance(1)
  seconds = time.perf_counter() - started
  counts = metrics.joined([outputs[row.index].statistics for row in part])
  timed = decode_many.Timed(
    statistics=counts, utilisation=used, seconds=seconds
  )
  visit = trials.Visit(
    gamma=gamma or 0,
    statistics=counts,
    num_iterations=used.num_iterations,
    fill_seconds=used.fill_seconds,
    loop_seconds=used.loop_seconds,
    compile_seconds=started - began,
  )
  return outputs, timed, visit
