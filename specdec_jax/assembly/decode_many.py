"""Many prompts through one batch whose finished rows are refilled.

A batch of fixed rows waits for its slowest. Here the compiled loop returns as
soon as some rows are done, the host takes their results and puts the next
prompts in their place, and the loop goes on.
"""

import dataclasses
import itertools
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, TypeVar

import jax
import numpy as np

from specdec_jax.base import Params, Prompt
from specdec_jax.decoding import rates as metrics
from specdec_jax.decoding.program import Refill
from specdec_jax.decoding.state import DecodeOutput, DecodeState
from specdec_jax.decoding.statistics import Statistics
from specdec_jax.theory import estimates

_Example = TypeVar('_Example')


@dataclasses.dataclass
class Utilisation:
  """How well the B rows were used; counts up while decoding goes on.

  Each iteration is a target run of the whole batch, in which as many rows took
  part as `num_row_runs` counts.
  """

  num_rows: int
  num_iterations: int = 0
  num_row_runs: int = 0
  fill_seconds: float = 0.0
  loop_seconds: float = 0.0

  def count(self, runs: np.ndarray) -> None:
    """Adds the target runs of the rows that took part in some iterations."""
    # Rows that took 5, 3 and 2 runs: 5 iterations, and 10 of their 15 places
    # were used.
    self.num_iterations += int(runs.max())
    self.num_row_runs += int(runs.sum())

  @property
  def share(self) -> float | None:
    """Of all rows of all target runs, those that were not idle."""
    total = self.num_iterations * self.num_rows
    return estimates.quotient(self.num_row_runs, total)


@dataclasses.dataclass(frozen=True)
class Timed:
  """One chunk, or several together: counters of every row, use of the batch,
  and seconds of decoding, without loading and compiling."""

  statistics: Statistics
  utilisation: Utilisation
  seconds: float

  def figures(self) -> dict[str, float]:
    """Returns rates by name, without those of which nothing was counted."""
    rates = metrics.rates(self.statistics)
    num_rows = self.statistics.num_tokens.size
    figures: dict[str, Any] = {
      'tokens_per_second': self.statistics.num_tokens.sum() / self.seconds,
      'examples_per_second': num_rows / self.seconds,
      'tokens_per_target_run': rates.block_efficiency,
      'alpha': rates.alpha,
      'row_utilisation': self.utilisation.share,
    }
    return {k: float(v) for k, v in figures.items() if v is not None}


def together(chunks: Sequence[Timed]) -> Timed:
  """Adds up several chunks, as if they were one."""
  counters = [vars(chunk.utilisation) for chunk in chunks]
  totals = {
    name: sum(counter[name] for counter in counters) for name in counters[0]
  }
  totals['num_rows'] = counters[0]['num_rows']
  return Timed(
    metrics.joined([chunk.statistics for chunk in chunks]),
    Utilisation(**totals),
    sum(chunk.seconds for chunk in chunks),
  )


def warm_up(programs: Refill, params: Params, prompt: Prompt) -> None:
  """Compiles the programs, by decoding a prompt of empty rows."""
  # All rows stay idle, so that the loop returns before its first iteration.
  nothing = np.full(programs.batch_size, -1, np.int32)
  fresh = programs.init(params, np.uint32(0), prompt)
  state = programs.replace(programs.idle(fresh), fresh, nothing)
  jax.block_until_ready(programs.run(params, state, np.int32(1)))


def decode(
  programs: Refill,
  params: Params,
  seed: int,
  examples: Iterable[_Example],
  *,
  pack: Callable[[Sequence[_Example | None]], Prompt],
  utilisation: Utilisation,
  keep: Callable[[DecodeState, int], Any] = lambda state, row: None,
) -> Iterator[tuple[_Example, DecodeOutput, Any]]:
  """Decodes examples, which are read as rows become free. Yields each when its
  row finishes, with the output of that row, as numpy arrays, and the result of
  `keep`.

  Args:
    pack: from N examples, None for a row that stays empty, to their prompt. The
      row ids should name the examples, so that results depend on no neighbour.
    keep: given the state, of all rows, and the number of a row that is done, to
      read what is no part of the output.
  """
  waiting = iter(examples)
  is_exhausted = False
  # The example that each row decodes; None for a free row.
  rows: list[_Example | None] = [None] * programs.batch_size
  runs_before = np.zeros(programs.batch_size, np.int64)
  state = None
  while True:
    while not is_exhausted and rows.count(None) >= programs.refill_size:
      group = list(itertools.islice(waiting, programs.refill_size))
      is_exhausted = len(group) < programs.refill_size
      if group:
        sources = _put(group, rows)
        missing = programs.refill_size - len(group)
        prompt = pack([*group, *[None] * missing])
        started = time.perf_counter()
        fresh = programs.init(params, np.uint32(seed), prompt)
        state = programs.idle(fresh) if state is None else state
        state = jax.block_until_ready(programs.replace(state, fresh, sources))
        utilisation.fill_seconds += time.perf_counter() - started
        runs_before[sources >= 0] = 0
    if state is None or rows.count(None) == programs.batch_size:
      return
    # The loop returns when a refill's number of rows is free.
    wanted = programs.batch_size if is_exhausted else programs.refill_size
    started = time.perf_counter()
    state, output = programs.run(params, state, np.int32(wanted))
    output = jax.device_get(output)
    utilisation.loop_seconds += time.perf_counter() - started
    # A row's counters go on from call to call: runs [7, 4] after [5, 0] are 2
    # and 4 in this call.
    is_taken = np.array([example is not None for example in rows])
    runs = output.statistics.num_target_runs - runs_before
    utilisation.count(runs[is_taken])
    runs_before = runs_before + np.where(is_taken, runs, 0)
    for row, example in enumerate(rows):
      if example is not None and output.done[row]:
        rows[row] = None
        yield example, _row_of(output, row), keep(state, row)


def decode_whole(
  compute: Callable[[Sequence[_Example | None]], Any],
  examples: Iterable[_Example],
  *,
  batch_size: int,
  utilisation: Utilisation,
) -> Iterator[tuple[_Example, Any]]:
  """Decodes examples in batches that begin and end together, in order, and
  yields each with its output of one row; `compute` gives the output of B of
  them, in numpy, None being a row that stays empty. Otherwise as `decode`."""
  waiting = iter(examples)
  while group := list(itertools.islice(waiting, batch_size)):
    started = time.perf_counter()
    output = compute([*group, *[None] * (batch_size - len(group))])
    utilisation.loop_seconds += time.perf_counter() - started
    utilisation.count(output.statistics.num_target_runs[: len(group)])
    for row, example in enumerate(group):
      yield example, _row_of(output, row)


def _row_of(output: Any, row: int) -> Any:
  """Returns the output of one row, with its axis."""
  return jax.tree.map(lambda leaf: leaf[row : row + 1], output)


def _put(group: Sequence[_Example], rows: list[_Example | None]) -> np.ndarray:
  """Puts a group into free rows; returns, int32 `[B]`, the number in the group
  that each row took, or -1."""
  # Rows [A, None, C, None] and a group [E, F]: sources [-1, 0, -1, 1]. With a
  # last group [E] the second fresh row is empty, and stays unused.
  sources = np.full(len(rows), -1, np.int32)
  for i, example in enumerate(group):
    row = rows.index(None)
    rows[row], sources[row] = example, i
  return sources
