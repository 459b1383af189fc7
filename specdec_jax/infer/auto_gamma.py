"""`gamma='auto'` in `infer`: which batches try what, and what they show."""

import itertools
from collections.abc import Iterator, Sequence

from specdec_jax.assembly import drafting
from specdec_jax.assembly.decoder import Decoder
from specdec_jax.infer.examples import Row
from specdec_jax.infer.report import Timed
from specdec_jax.measure import trials
from specdec_jax.measure.trials import Visit
from specdec_jax.theory import choosing
from specdec_jax.theory.choosing import Choice


def schedule(
  decoder: Decoder, rows: Iterator[Row], batch_size: int
) -> tuple[Iterator[Row], tuple[int, ...], Choice | None]:
  """The examples again; the gammas that their first batches try, none unless
  gamma is 'auto'; and the choice where there are too few to try any."""
  if not decoder.is_auto:
    return rows, (), None
  gammas = drafting.auto_gammas(decoder.choice)
  needed = trials.num_batches_needed(gammas, batch_size)
  first = list(itertools.islice(rows, needed * batch_size))
  num_batches = len(first) // batch_size
  turns = trials.schedule(gammas, batch_size, num_batches)
  choice = None if turns else trials.too_short(gammas, num_batches)
  return itertools.chain(first, rows), turns, choice


def choose(
  gammas: Sequence[int], parts: Sequence[Timed], batch_size: int
) -> Choice:
  """What batches show, each decoded with its gamma."""
  visits: dict[int, list[Visit]] = {gamma: [] for gamma in gammas}
  for gamma, part in zip(gammas, parts, strict=True):
    visits[gamma].append(
      Visit(
        gamma=gamma,
        statistics=part.statistics,
        num_iterations=part.utilisation.num_iterations,
        fill_seconds=part.utilisation.fill_seconds,
        loop_seconds=part.utilisation.loop_seconds,
      )
    )
  found = [trials.trial(each, waits=False) for each in visits.values()]
  return choosing.choose(found, batch_size)
