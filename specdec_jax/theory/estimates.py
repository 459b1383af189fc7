"""Estimates of rates from counts, with their errors."""

import numpy as np

_NORMAL_QUANTILE = 1.96  # The quantile of 97.5%.


def quotient(numerator: float, denominator: float) -> float | None:
  """Divides two scalars; None if `denominator` is 0: nothing was counted."""
  return float(numerator) / float(denominator) if denominator else None


def ratio(
  sums: np.ndarray, counts: np.ndarray
) -> tuple[float, list[float] | None]:
  """Estimates a ratio of sums over rows, and its 95% interval.

  `sums`, such as accepted tokens, and `counts`, such as tested ones, are `[R]`;
  ValueError if nothing was counted. Fewer than two rows have no interval.
  """
  if not counts.sum():
    raise ValueError(f'nothing was counted in {len(counts)} rows')
  value = float(sums.sum() / counts.sum())
  error = standard_error(sums, counts)
  if error is None:
    return value, None
  half = _NORMAL_QUANTILE * error
  return value, [value - half, value + half]


def standard_error(sums: np.ndarray, counts: np.ndarray) -> float | None:
  """Estimates the standard error of a `ratio`; None for fewer than two rows."""
  # Rows are the sampling unit, since neighbouring tokens are not independent:
  # the variance is that of a ratio estimate, linearised (Cochran, Sampling
  # Techniques, 3rd edition, chapter 6).
  is_counted = counts > 0
  num_rows = int(is_counted.sum())
  if num_rows < 2:
    return None
  # The distance of rows from the mean, in counts: -2 for 3 of 10 and mean 0.5.
  excess = (sums - sums.sum() / counts.sum() * counts)[is_counted]
  deviation = np.sqrt((excess**2).sum() * num_rows / (num_rows - 1))
  return float(deviation / counts.sum())
