"""Chunks of examples, which a restart does not repeat: how they are read, the
same in all processes, and decoded.

`gamma='auto'` is chosen on the first examples of a run, which are decoded
anyway, turn by turn with one of a few gammas: the fastest serves the rest. A
turn is a few consecutive examples, all decoded with one gamma.
"""

import collections
import contextlib
import dataclasses
import functools
import itertools
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import jax
import numpy as np

from specdec_jax.assembly import auto_gamma, decode_many
from specdec_jax.assembly import decoder as decoder_lib
from specdec_jax.base import Params
from specdec_jax.decoding import rates as metrics
from specdec_jax.drafters import text_pool
from specdec_jax.infer import examples, strategies
from specdec_jax.infer.decoding import Job
from specdec_jax.infer.examples import Row
from specdec_jax.infer.records import Record
from specdec_jax.launch import agreement, processes, progress
from specdec_jax.measure import trials
from specdec_jax.sharding import mesh as mesh_lib
from specdec_jax.theory.gamma_trials import ChosenGamma

_LOOP = 'refilled'


class Ahead:
  """Examples of which `has` can tell how many follow, before they are used."""

  def __init__(self, rows: Iterator[Row]):
    self._rows = rows
    self._seen: collections.deque[Row] = collections.deque()

  def has(self, num_rows: float) -> bool:
    """Tells whether `num_rows` more examples follow, and reads them."""
    missing = max(0, int(num_rows) - len(self._seen))
    self._seen.extend(itertools.islice(self._rows, missing))
    return len(self._seen) >= num_rows

  def __iter__(self) -> Iterator[Row]:
    return self

  def __next__(self) -> Row:
    return self._seen.popleft() if self._seen else next(self._rows)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Gammas:
  """What a run decodes with, from one chunk to the next.

  Attributes:
    job: what is decoded.
    rows: the examples that are not read yet.
    is_long: whether they are enough for a first chunk that compares gammas.
    is_open: whether gamma is chosen with the next chunk, the first.
    choice: what was chosen, or was remembered and holds unless these examples
      speak against it; None for a gamma that is given, or not known yet.
  """

  job: Job
  rows: Ahead
  is_long: bool = False
  is_open: bool = False
  choice: ChosenGamma | None = None

  @property
  def turn(self) -> int:
    """The examples of a turn."""
    decoding = self.job.decoding
    size = trials.num_batches_of_turn(decoding.batch_size)
    return size * decoding.batch_examples

  @property
  def num_first(self) -> int | None:
    """The examples of the first chunk, if it has a number of its own."""
    # The number is the same whatever is remembered, as another run may change
    # that before this one is started again.
    if not (self.is_long and self.is_open):
      return None
    return self.turn * trials.num_turns(self.job.decoder.tried_gammas)

  def choose(
    self, decode: Callable[[int], Sequence[trials.Visit]]
  ) -> ChosenGamma | None:
    """Returns the choice, if need be by decoding the first examples in turns,
    as long as that is worth it."""
    is_plain = self.choice is not None and not self.choice.gamma
    if is_plain or not (self.is_open and self.is_long):
      return self.choice
    found = trials.choose(
      self.job.decoder.tried_gammas,
      decode,
      batch_size=self.job.decoding.batch_size,
      waits=False,
      known=self.choice,
      is_worth=lambda num_turns: self.rows.has(num_turns * self.turn),
    )
    found = dataclasses.replace(found, turn_examples=self.turn)
    if self.choice is None and processes.is_first():
      auto_gamma.keep(_where(self.job), found)
    return self.settle(found).choice

  def settle(self, choice: ChosenGamma | None) -> 'Gammas':
    """Returns these with the first process's choice, known to all."""
    # `number_of_first` sends the argument of the first process to all.
    gamma = processes.number_of_first(0 if choice is None else choice.gamma)
    if choice is None or choice.gamma != gamma:
      choice = ChosenGamma(gamma=gamma, sentence='')
    return dataclasses.replace(self, choice=choice, is_open=False)


def begin(job: Job, rows: Iterator[Row]) -> Gammas:
  """Returns what the first examples are decoded with: what is remembered, or
  plain decoding until there is something to choose from."""
  is_auto = job.decoder.is_auto
  begun = Gammas(job=job, rows=Ahead(rows), is_long=is_auto, is_open=is_auto)
  if not is_auto:
    return begun
  # To be timed, a batch waits for its slowest row.
  batch_examples = job.decoding.batch_examples
  least = trials.NUM_BATCHES * batch_examples if batch_examples > 1 else 0
  is_long = begun.rows.has(max(least, 1 + (begun.num_first or 0)))
  known = _recall(job) if processes.is_first() else None
  # Of shorter texts, for which the drafter had room.
  if known is not None and known.gamma > max(job.decoder.tried_gammas):
    known = None
  # The other processes need only the gamma of a choice; -1 is none.
  gamma = processes.number_of_first(-1 if known is None else known.gamma)
  if known is None and gamma >= 0:
    known = ChosenGamma(gamma=gamma, sentence='')
  if known is None and not is_long:
    known = trials.unmeasured()
  return dataclasses.replace(begun, is_long=is_long, choice=known)


def _recall(job: Job) -> ChosenGamma | None:
  """Returns what is remembered of such batches, or else that drafts pay even in
  batches that wait for their slowest row, as in `bench`."""
  known, waiting = (trials.recall(_where(job, x)) for x in (_LOOP, 'whole'))
  return known or (waiting if waiting and waiting.gamma else None)


def _where(job: Job, loop: str = _LOOP) -> dict[str, str]:
  size, mesh = job.decoding.batch_size, job.mesh
  return auto_gamma.where(job.decoder, size, mesh.size, loop)


@dataclasses.dataclass(frozen=True)
class Chunk:
  """Consecutive examples, and their digest, see `examples.digest`."""

  index: int
  rows: tuple[Row, ...]
  digest: str


def read(rows: Iterator[Row], sizes: Iterable[int]) -> Iterator[Chunk]:
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
  """The lines of a chunk, in order, and its time; and the gamma that was chosen
  for the rest of it, and for all chunks after it."""

  lines: list[Record]
  timed: decode_many.Timed
  choice: ChosenGamma | None


def decode(
  loaded: Loaded,
  rows: Sequence[Row],
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
    # Programs are compiled by now, and stay out of the trace.
    if profile_dir is not None:
      stack.enter_context(jax.profiler.trace(profile_dir))
    bar = stack.enter_context(progress.bar('decoding', len(rows) * num_samples))
    choice = gammas.choose(lambda gamma: decode_next(gamma, gammas.turn))
    chosen = None if choice is None else choice.gamma
    # Programs take memory: drop those of gammas that lost.
    for gamma in {*loaded.programs} - {chosen}:
      del loaded.programs[gamma]
    if left:
      decode_next(chosen, len(left))
  # With S samples, row i is decoded as rows i S .. i S + S - 1.
  record = strategies.of(job).record
  at = lambda row: range(row.index * num_samples, (row.index + 1) * num_samples)
  lines = [record(row, [outputs[i] for i in at(row)], job) for row in rows]
  timed = decode_many.together(parts)
  return Decoded(lines=lines, timed=timed, choice=choice)


def _decode_part(
  loaded: Loaded,
  part: Sequence[Row],
  gamma: int | None,
  bar: progress.Bar,
) -> tuple[dict[int, Any], decode_many.Timed, trials.Visit]:
  """Decodes rows with one gamma; returns outputs by index, and times."""
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
  timed = decode_many.Timed(counts, used, seconds)
  visit = trials.Visit(
    gamma=gamma or 0,
    statistics=counts,
    num_iterations=used.num_iterations,
    fill_seconds=used.fill_seconds,
    loop_seconds=used.loop_seconds,
    compile_seconds=started - began,
  )
  return outputs, timed, visit
