"""Measures which gamma is fastest, by decoding a few rows with several.

`specdec bench` does so where no gamma is given, and so do jobs that are started
with `measure_gamma`, on their first rows and before they begin. The result is
remembered (`assembly.gamma_memory`).
"""

import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np

from specdec_jax.assembly import gamma_memory, running, settled_gamma
from specdec_jax.assembly.decoder import Decoder
from specdec_jax.assembly.gamma_memory import RememberedGamma
from specdec_jax.decoding import rates
from specdec_jax.decoding.state import DecodeOutput
from specdec_jax.decoding.statistics import Statistics
from specdec_jax.launch import progress
from specdec_jax.measure import gamma_trials, stopwatch
from specdec_jax.measure.gamma_trials import ChosenGamma, Trial
from specdec_jax.text.prompts import Batch
from specdec_jax.theory import estimates

# Rows that are enough to time a gamma once.
NUM_ROWS = 8
# Tokens of the warm-up of a program.
_NUM_WARM = 4


@dataclasses.dataclass(frozen=True, kw_only=True)
class Measurement:
  """Counters and times of rows that were decoded with one gamma."""

  gamma: int
  statistics: Statistics
  num_iterations: int
  fill_seconds: float
  loop_seconds: float


def choose(
  tried: Sequence[int],
  decode: Callable[[int], Iterable[Measurement]],
  *,
  batch_size: int,
  waits: bool,
) -> ChosenGamma:
  """Chooses a gamma by decoding rows with each of several.

  Args:
    tried: the gammas to try, ascending, 0 among them.
    decode: decodes some rows with a gamma, in batches or all together.
    batch_size: rows that are decoded at once.
    waits: whether a batch waits for its slowest row; else rows are refilled.
  """
  measurements: dict[int, list[Measurement]] = {}
  # The order for gammas 0, 2 and 5 is 0 2 5 5 2 0, so that a drift of the
  # machine's speed cancels.
  for gamma in (*tried, *reversed(tried)):
    measurements.setdefault(gamma, []).extend(decode(gamma))
  trials = [
    trial(gamma_measurements, waits=waits)
    for gamma_measurements in measurements.values()
  ]
  return gamma_trials.choose(trials, batch_size)


def trial(measurements: Sequence[Measurement], *, waits: bool) -> Trial:
  """Sums up the measurements of one gamma."""
  # Utilisation: of 2 rows in 10 iterations, with 8 and 10 target runs, 18 of 20
  # places were used, 0.9.
  total: Any = rates.joined(
    [measurement.statistics for measurement in measurements]
  )
  num_places = sum(
    measurement.num_iterations * measurement.statistics.num_tokens.size
    for measurement in measurements
  )
  seconds = np.array([measurement.loop_seconds for measurement in measurements])
  iterations = np.array(
    [measurement.num_iterations for measurement in measurements]
  )
  iteration_seconds = float(seconds.sum() / iterations.sum())
  error = estimates.standard_error(seconds, iterations) or 0.0
  utilisation = 1.0
  if waits:
    utilisation = float(total.num_target_runs.sum() / num_places)
  return Trial(
    gamma=measurements[0].gamma,
    num_tokens=total.num_tokens,
    num_runs=total.num_target_runs,
    num_tested=total.num_tested,
    num_accepted=total.num_accepted,
    fill_seconds=sum(measurement.fill_seconds for measurement in measurements)
    / total.num_tokens.size,
    iteration_seconds=iteration_seconds,
    iteration_error=error / iteration_seconds,
    utilisation=utilisation,
  )


def measure(
  decoder: Decoder,
  batches: Sequence[Batch],
  settings: running.DecodeSettings,
  *,
  source: str,
  title: str = 'measuring gamma',
) -> ChosenGamma:
  """Chooses the gamma for batches of one shape, and remembers it.

  Each trial decodes the next group of batches; if there are few, they are
  decoded repeatedly. `source` is the command that measures, for later reports.
  """
  tried = tuple(
    gamma
    for gamma in decoder.tried_gammas
    if running.has_room(decoder, batches[0], settings.most_new_tokens, gamma)
  )
  batches_at_once = -(-NUM_ROWS // settings.num_rows)
  next_batches = itertools.cycle(batches)
  programs = {
    gamma: compile_for(decoder.at(gamma), batches[0], settings)
    for gamma in tried
  }
  with progress.bar(title, 2 * len(tried)) as bar:

    def decode(gamma: int) -> list[Measurement]:
      program = programs[gamma]
      measurements = []
      for batch in itertools.islice(next_batches, batches_at_once):
        _, measurement = settings.call(functools.partial(program, batch))
        measurements.append(measurement)
      bar.advance(1)
      return measurements

    choice = choose(tried, decode, batch_size=settings.num_rows, waits=True)
  keep(decoder, settings.num_rows, settings.num_devices, choice, source)
  return choice


def keep(
  decoder: Decoder,
  num_rows: int,
  num_devices: int,
  choice: ChosenGamma,
  source: str,
) -> RememberedGamma:
  """Remembers a choice, for this process and for later ones."""
  remembered = RememberedGamma(
    gamma=choice.gamma,
    source=source,
    reason=choice.sentence,
    tokens_per_second=choice.tokens_per_second,
  )
  decoder.gammas[num_rows, num_devices] = remembered
  where = settled_gamma.place(decoder, num_rows, num_devices)
  gamma_memory.remember(where, remembered)
  return remembered


def compile_for(
  decoder: Decoder, first: Batch, settings: running.DecodeSettings
) -> Callable[[Batch], tuple[DecodeOutput, Measurement]]:
  """Compiles prefill and loop for such batches, and warms them up.

  Returns:
    Decodes a batch: what came out, and how long it took.
  """
  params, [prefill, loop, _] = running.compiled(
    decoder, first, settings, running.parts
  )

  def decode(batch: Batch) -> tuple[DecodeOutput, Measurement]:
    key, prompt = running.placed(batch, settings)
    state, fill_seconds = stopwatch.run_seconds(prefill, params, key, prompt)
    result, loop_seconds = stopwatch.run_seconds(
      loop, params, state, running.ALL
    )
    output: DecodeOutput = result[1]
    statistics = output.statistics
    measurement = Measurement(
      gamma=decoder.drafter.gamma,
      statistics=statistics,
      num_iterations=int(statistics.num_target_runs.max()),
      fill_seconds=fill_seconds,
      loop_seconds=loop_seconds,
    )
    return output, measurement

  # Warm up: the first run of a program is slower.
  most = first.prompt.decoder_lengths + _NUM_WARM
  prompt = dataclasses.replace(first.prompt, max_lengths=most)
  few = dataclasses.replace(first, prompt=prompt)
  settings.call(lambda: decode(few))
  return decode
