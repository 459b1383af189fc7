"""The G-test of counts against distributions, and the bias it can detect."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
from scipy import optimize, stats


class Cells(NamedTuple):
  """Observed and expected counts of outcomes, float64 `[K]` each. An expected
  count of 0 is of outcomes that were drawn although their probability is 0."""

  observed: np.ndarray
  expected: np.ndarray


def pool(
  observed: np.ndarray, probs: np.ndarray, min_expected: float = 5.0
) -> Cells:
  """Pools outcomes `[V]` with expected counts below `min_expected` with those
  of similar probability; if they are too few for a pool, they are added to the
  likeliest outcome."""
  expected = probs * (observed.sum() / probs.sum())
  # Likeliest first, without impossible outcomes: probs [.2, 0, .8] have the
  # order [2, 0].
  order = np.argsort(-expected, kind='stable')
  order = order[probs[order] > 0]
  both = np.stack([observed, expected])[:, order]
  num_kept = int((both[1] >= min_expected).sum())
  cells, rare = both[:, :num_kept], both[:, num_kept:]
  total = rare[1].sum()
  # Pools begin at multiples of 10 of the expected counts, so that each has 5.
  num_pools = max(1, int(total // (2 * min_expected)))
  begins = (np.cumsum(rare[1]) - rare[1]) // (2 * min_expected)
  pools = np.zeros((num_pools, 2))
  np.add.at(pools, np.minimum(begins, num_pools - 1).astype(int), rare.T)
  if total >= min_expected or not num_kept:
    cells = np.column_stack([cells, pools.T])
  else:
    cells[:, 0] += pools[0]
  if impossible := observed[probs == 0].sum():
    cells = np.column_stack([cells, (impossible, 0)])
  return Cells(*cells)


class GTest(NamedTuple):
  """A likelihood-ratio test of counts against distributions.

  Attributes:
    statistic: the sum of 2 O ln(O / E); infinite if the impossible was drawn.
    degrees: degrees of freedom.
    num_draws: number of draws, n in `bound` and `detectable`.
  """

  statistic: float
  degrees: int
  num_draws: int

  @property
  def p_value(self) -> float:
    if self.degrees or self.statistic:
      return float(stats.chi2.sf(self.statistic, max(1, self.degrees)))
    return 1.0

  def bound(self, confidence: float) -> float:
    """Bounds the total variation of the draws' distribution from the expected
    one: beyond it, a statistic as small as this has a probability below `1 -
    confidence`.
    """
    # At a total variation of d the statistic is nearly noncentral chi-squared,
    # with noncentrality 2 n KL >= 4 n d^2 (Pinsker).
    # An unusually small statistic is replaced by its mean.
    seen = max(self.statistic, self.degrees)
    return self._distance(
      lambda x: stats.ncx2.sf(seen, self.degrees, x), confidence
    )

  def detectable(self, false_alarm_rate: float, power: float) -> float:
    """Computes the least total variation at which any bias among the cells is
    rejected with a probability of at least `power`."""
    limit = stats.chi2.isf(false_alarm_rate, self.degrees)
    return self._distance(
      lambda x: stats.ncx2.sf(limit, self.degrees, x), power
    )

  def _distance(self, rising: Callable[[float], float], goal: float) -> float:
    """Finds the noncentrality x with `rising(x) = goal`, as a total variation
    d."""
    if not self.degrees or np.isinf(self.statistic):
      return 1.0
    high = 1.0
    while rising(high) < goal:
      high *= 2
    noncentrality = optimize.brentq(lambda x: rising(x) - goal, 1e-9, high)
    return min(1.0, 0.5 * (noncentrality / self.num_draws) ** 0.5)


def g_test(rows: Sequence[Cells], num_draws: int) -> GTest:
  """Tests rows of cells together."""
  statistic = 0.0
  degrees = 0
  for observed, expected in rows:
    is_possible, num = expected > 0, observed.sum()
    if not is_possible.all():
      statistic = np.inf
    observed, expected = observed[is_possible], expected[is_possible]
    if freedom := len(expected) - 1:
      seen = observed > 0
      terms = observed[seen] * np.log(observed[seen] / expected[seen])
      # Williams's correction (1976, Biometrika 63), without which the mean over
      # many small cells is too large.
      correction = 1 + ((num / expected).sum() - 1) / (6 * num * freedom)
      statistic += 2 * terms.sum() / correction
      degrees += freedom
  return GTest(float(statistic), degrees, num_draws)


def biased(rng: np.random.Generator, row: Cells, bias: float) -> Cells:
  """Draws a row again from its own frequencies, after moving a total variation
  of `bias` to the likeliest outcome, or to the rarest if one has over half."""
  probs = row.observed / row.observed.sum()
  to = probs.argmax() if probs.max() < 0.5 else probs.argmin()
  # Of [.5, .3, .2], .06 to the rarest: the others keep 74/80 of theirs.
  share = min(1.0, bias / (1 - probs[to])) if len(probs) > 1 else 0.0
  probs = (1 - share) * probs
  probs[to] += share
  num = int(row.observed.sum())
  return row._replace(observed=rng.multinomial(num, probs / probs.sum()))
