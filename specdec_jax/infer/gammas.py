"""Choosing `gamma='auto'` on the first examples of a run, which are decoded
anyway, turn by turn with one of a few gammas: the fastest serves the rest."""

import collections
import dataclasses
import itertools
from collections.abc import Callable, Iterator, Sequence

from specdec_jax.assembly import auto_gamma
from specdec_jax.infer.decoding import Job
from specdec_jax.infer.examples import Row
from specdec_jax.launch import processes
from specdec_jax.measure import remembered, trials
from specdec_jax.theory.gamma_trials import ChosenGamma


class Ahead:
  """Examples that can be looked for before they are read."""

  def __init__(self, rows: Iterator[Row]):
    self._rows = rows
    self._seen: collections.deque[Row] = collections.deque()

  def has(self, num_rows: float) -> bool:
    """Whether there are so many more."""
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
    job: whose gamma it is.
    rows: the examples that are not read yet.
    is_long: whether there are enough examples for a first chunk that compares
      gammas.
    is_open: whether gamma is chosen with the next chunk, the first.
    choice: what was chosen, or is to hold if these examples do not speak
      against it; None for a gamma that is given, or not known.
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
    # It does not depend on what is remembered: another run may change that
    # before this one is started again.
    if not (self.is_long and self.is_open):
      return None
    return self.turn * trials.num_turns(self.job.decoder.tried_gammas)

  @property
  def sentence(self) -> str:
    """What there is to say of a choice; empty before it is made."""
    return '' if self.is_open or not self.choice else self.choice.sentence

  def choose(
    self, decode: Callable[[int], Sequence[trials.Visit]]
  ) -> ChosenGamma | None:
    """Returns the choice; the first examples are decoded to make it where that
    is worth it, turn by turn."""
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
    """With the choice of the first process, of which others learn gamma."""
    # `number_of_first` sends the argument of the first process to all.
    gamma = processes.number_of_first(0 if choice is None else choice.gamma)
    if choice is None or choice.gamma != gamma:
      choice = ChosenGamma(gamma=gamma, sentence='')
    return dataclasses.replace(self, choice=choice, is_open=False)


def begin(job: Job, rows: Iterator[Row]) -> Gammas:
  """Returns what the first examples are decoded with: what is remembered, or
  plain decoding until there is something to choose from."""
  begun = Gammas(job=job, rows=Ahead(rows), is_open=job.decoder.is_auto)
  if not begun.is_open:
    return begun
  # To look at the clock, a batch has to wait for its slowest row.
  batch_examples = job.decoding.batch_examples
  least = trials.NUM_BATCHES * batch_examples if batch_examples > 1 else 0
  begun = dataclasses.replace(begun, is_long=True)
  is_long = begun.rows.has(max(least, 1 + (begun.num_first or 0)))
  known = None
  if processes.is_first():
    known = remembered.recall(_where(job))
  # Of a choice the other processes need the gamma alone; -1 is none.
  gamma = processes.number_of_first(-1 if known is None else known.gamma)
  if known is None and gamma >= 0:
    known = ChosenGamma(gamma=gamma, sentence='')
  if known is None and not is_long:
    known = trials.unmeasured()
  return dataclasses.replace(begun, is_long=is_long, choice=known)


def _where(job: Job) -> dict[str, str]:
  size, mesh = job.decoding.batch_size, job.mesh
  return auto_gamma.where(job.decoder, size, mesh.size, 'refilled')
