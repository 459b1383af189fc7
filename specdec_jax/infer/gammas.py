"""Choosing `gamma='auto'` on the first examples of a run, which are decoded
anyway: each batch with one of a few gammas, the fastest for all that follow."""

import dataclasses
import itertools
from collections.abc import Iterator, Sequence

from specdec_jax.infer.decode_many import Timed
from specdec_jax.infer.decoding import Job
from specdec_jax.infer.examples import Row
from specdec_jax.launch import processes
from specdec_jax.measure import trials
from specdec_jax.theory import gamma_trials


@dataclasses.dataclass(frozen=True, kw_only=True)
class Gammas:
  """What a run decodes with, from one chunk to the next.

  Attributes:
    turns: of the batches of the first chunk, which compare gammas; empty if
      none are compared.
    choice: what was chosen; None for a gamma that is given, or not yet chosen.
  """

  turns: tuple[int, ...] = ()
  choice: gamma_trials.ChosenGamma | None = None

  @property
  def is_trial(self) -> bool:
    """Whether the next chunk is the one that compares gammas."""
    return bool(self.turns) and self.choice is None

  @property
  def of_next_chunk(self) -> tuple[int | None, ...]:
    """The gammas of equal parts of the next chunk; None is the job's own."""
    if self.is_trial:
      return self.turns
    return (None if self.choice is None else self.choice.gamma,)

  @property
  def sentence(self) -> str:
    """What there is to say of a choice; empty before it is made."""
    return self.choice.sentence if self.choice else ''

  def settle(self, choice: gamma_trials.ChosenGamma | None) -> 'Gammas':
    """With the choice of the first process, of which others learn gamma."""
    # `number_of_first` sends the argument of the first process to all.
    if choice is None:
      choice = gamma_trials.ChosenGamma(
        gamma=processes.number_of_first(0), sentence=''
      )
    else:
      processes.number_of_first(choice.gamma)
    return dataclasses.replace(self, choice=choice)


def begin(job: Job, rows: Iterator[Row]) -> tuple[Iterator[Row], Gammas]:
  """Returns the examples again, and what the first of them are decoded with:
  plain decoding if there are too few to compare gammas."""
  if not job.decoder.is_auto:
    return rows, Gammas()
  batch_examples = job.decoding.batch_examples
  gammas = job.decoder.tried_gammas
  needed = trials.num_batches_needed(gammas, batch_examples)
  first = list(itertools.islice(rows, needed * batch_examples))
  num_batches = len(first) // batch_examples
  # Of gammas (0, 3, 11) and batches of 4 rows: (0, 3, 11, 11, 3, 0), so that
  # each decodes 8 rows and a drift of the machine's speed cancels.
  turns = trials.schedule(gammas, batch_examples, num_batches)
  choice = None if turns else trials.too_short(gammas, num_batches)
  return itertools.chain(first, rows), Gammas(turns=turns, choice=choice)


def choose(
  turns: Sequence[int], parts: Sequence[Timed], batch_size: int
) -> gamma_trials.ChosenGamma:
  """Returns what parts of a chunk show, each decoded with its gamma."""
  # Turns (0, 3, 3, 0) and parts a b c d: {0: [a, d], 3: [b, c]}.
  visits: dict[int, list[trials.Visit]] = {gamma: [] for gamma in turns}
  for gamma, part in zip(turns, parts, strict=True):
    visits[gamma].append(
      trials.Visit(
        gamma=gamma,
        statistics=part.statistics,
        num_iterations=part.utilisation.num_iterations,
        fill_seconds=part.utilisation.fill_seconds,
        loop_seconds=part.utilisation.loop_seconds,
      )
    )
  found = [trials.trial(each, waits=False) for each in visits.values()]
  return gamma_trials.choose(found, batch_size)
