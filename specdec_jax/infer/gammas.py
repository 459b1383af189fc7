"""Chooses the gamma of a job without one; the same in all processes."""

import itertools
from collections.abc import Iterable, Sequence
from typing import Any

from specdec_jax import lazy
from specdec_jax.assembly import gamma_memory, settled_gamma
from specdec_jax.assembly.gamma_memory import RememberedGamma
from specdec_jax.infer import chunks, examples
from specdec_jax.infer.chunks import Loaded
from specdec_jax.infer.decoding import Job
from specdec_jax.infer.examples import Row
from specdec_jax.launch import processes

_SEARCH = 'specdec_jax.measure.gamma_search'


def remembered(job: Job) -> tuple[int, str]:
  """Returns the gamma that was measured on this machine, else 0, and a
  sentence, which the first process prints."""
  # The gammas of a job are those that its drafter has room for.
  largest = max(job.decoder.tried_gammas)
  choice = settled_gamma.choose(
    job.decoder,
    num_rows=job.decoding.batch_size,
    num_devices=job.mesh.size,
    has_room=lambda gamma: gamma <= largest,
  )
  # All processes use the memory of the first.
  return processes.number_of_first(choice.gamma), choice.sentence


def measured(loaded: Loaded, rows: Iterable[Row]) -> tuple[int, str]:
  """Measures the fastest gamma on the first rows of a job, and remembers it.

  All processes decode together, and the clock of the first one counts. Returns
  the gamma and a sentence. ValueError without the extra `measure`.
  """
  choose = settled_gamma.measurement(f'{_SEARCH}:choose')
  measurement = lazy.attribute(f'{_SEARCH}:Measurement')
  job = loaded.job
  batch_size = job.decoding.batch_size
  first = list(itertools.islice(rows, settled_gamma.NUM_MEASURED_ROWS))
  samples = examples.sampled(first, job.decoding.num_samples)
  groups = itertools.cycle(_groups(samples, max(batch_size, 8)))
  programs = {
    gamma: loaded.at(gamma).compiled() for gamma in job.decoder.tried_gammas
  }

  def decode(gamma: int) -> list[Any]:
    _, timed = chunks.decode_rows(programs[gamma], next(groups))
    utilisation = timed.utilisation
    return [
      measurement(
        gamma=gamma,
        statistics=timed.statistics,
        num_iterations=utilisation.num_iterations,
        fill_seconds=utilisation.fill_seconds,
        loop_seconds=utilisation.loop_seconds,
      )
    ]

  # The first run of a program is slower.
  for gamma in programs:
    decode(gamma)
  choice = choose(
    job.decoder.tried_gammas, decode, batch_size=batch_size, waits=False
  )
  gamma = processes.number_of_first(choice.gamma)
  remembered_gamma = RememberedGamma(
    gamma=gamma,
    source='measure_gamma',
    reason=choice.sentence,
    tokens_per_second=choice.tokens_per_second,
  )
  if processes.is_first():
    gamma_memory.remember(_place(job), remembered_gamma)
  return gamma, remembered_gamma.sentence


def _place(job: Job) -> dict[str, str]:
  return settled_gamma.place(
    job.decoder, job.decoding.batch_size, job.mesh.size
  )


def _groups(rows: Sequence[Row], size: int) -> list[Sequence[Row]]:
  """Splits rows into groups of one size; drops the rest unless it is all."""
  groups = [rows[i : i + size] for i in range(0, len(rows), size)]
  full = [group for group in groups if len(group) == size]
  return full or groups
