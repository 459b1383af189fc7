"""Rows of a comparison, from times that are stated."""

import dataclasses

import numpy as np

from specdec_jax.decoding import statistics
from specdec_jax.decoding.rates import Counts
from specdec_jax.drafters.always_full import always_full
from specdec_jax.measure.comparison import Row, Timing
from specdec_jax.measure.loops import Timed
from specdec_jax.measure.sameness import Sameness


def some_counts(num_tokens, iterations, short=0):
  """Counters of so many tokens per row."""
  return Counts(
    statistics=dataclasses.replace(
      statistics.init(len(num_tokens), 3), num_tokens=np.array(num_tokens)
    ),
    iterations=iterations,
    short_iterations=short,
  )


def some_timed(seconds, num_tokens=0, iterations=1):
  """A lone batch."""
  made = Timed(np.array([seconds]), [None])
  # As cached properties keep them.
  made.__dict__['counts'] = some_counts([num_tokens], iterations)
  made.__dict__['num_tokens'] = np.array([num_tokens])
  return made


def some_row(baseline, drafted, **fields):
  """A row of loops that took such times, with drafts of three tokens."""
  timing = lambda loop: Timing(
    prefill=0.0, loop=loop, per_iteration=loop.per_iteration
  )
  row = Row(
    drafter=always_full(3),
    ends_early=False,
    drafted=timing(drafted),
    plain=timing(baseline),
    baseline=timing(baseline),
    sameness=Sameness(0, []),
  )
  return dataclasses.replace(row, **fields)
