"""The results of an audit, as Markdown and as JSON."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from specdec_jax.audit import goodness_of_fit
from specdec_jax.audit.goodness_of_fit import Cells, GTest

# Of bounds; also the power of `Check.detectable`.
CONFIDENCE = 0.95


class Counts(NamedTuple):
  """What is to be tested: rows of cells, the number of draws, and of these how
  many are in no cell."""

  rows: Sequence[Cells]
  num_draws: int
  num_untested: int


class Check(NamedTuple):
  """One test of the engine's draws.

  Attributes:
    name: what is tested, such as 'prompt 1, token 2'.
    test: its statistic.
    p_value: adjusted for the number of tests (Bonferroni).
    detectable: the least bias of cells, in total variation, that is rejected
      with a probability of 95%; 1 if the test can see none. A bias among the
      tokens of one cell is not seen.
    bound: upper bound on the bias of cells, in total variation, with 95%
      confidence.
    is_control_rejected: whether the test rejects a control: the engine's counts
      drawn again with twice the detectable bias. None if that is impossible.
    num_untested: draws that are in no cell. Their share is part of `detectable`
      and of `bound`, as all of them may be wrong.
  """

  name: str
  test: GTest
  p_value: float
  detectable: float
  bound: float
  is_control_rejected: bool | None
  num_untested: int


class Report(NamedTuple):
  """The verdict on an engine; `str` gives Markdown, aligned for a terminal.

  Attributes:
    checks: the tests.
    faults: errors that need no statistics, such as a missing EOS.
    differences: where greedy tokens differ from the model's argmax; None if
      they were not compared.
    false_alarm_rate: the probability to reject an engine without bias.
  """

  checks: tuple[Check, ...]
  faults: tuple[str, ...]
  differences: tuple[str, ...] | None
  false_alarm_rate: float

  @property
  def p_value(self) -> float:
    return min(check.p_value for check in self.checks)

  @property
  def is_rejected(self) -> bool:
    return bool(self.faults) or self.p_value <= self.false_alarm_rate

  @property
  def verdict(self) -> str:
    """'REJECTED', 'not rejected', or 'inconclusive' if nothing could be tested
    or a control was not rejected."""
    if self.is_rejected:
      return 'REJECTED'
    controls = {check.is_control_rejected for check in self.checks}
    is_sure = True in controls and False not in controls
    return 'not rejected' if is_sure else 'inconclusive'

  def to_json(self) -> dict[str, Any]:
    """Returns all figures as JSON values; an infinite statistic is None."""
    checks = [check._asdict() | check.test._asdict() for check in self.checks]
    for check in checks:
      del check['test']
      if np.isinf(check['statistic']):
        check['statistic'] = None
    figures = self._asdict() | {'checks': checks}
    return {'kind': 'specdec audit', 'verdict': self.verdict, **figures}

  def __str__(self) -> str:
    least = min(self.checks, key=lambda check: check.p_value)
    lines = [
      f'{self.verdict}: p {self.p_value:.2g} of {least.name}, corrected for '
      f'{len(self.checks)} tests; rejected at {self.false_alarm_rate:g}.',
      *(f'Fault: {fault}.' for fault in self.faults),
    ]
    lines += [
      f'Not tested: {check.num_untested} of {check.test.num_draws} draws of '
      f'{check.name}, as too many prefixes are reached.'
      for check in self.checks
      if check.num_untested
    ]
    if self.differences is not None:
      lines.append(f'Greedy: {len(self.differences)} prompts differ.')
      lines += [f'Greedy: {difference}.' for difference in self.differences]
    # A Markdown table whose columns are as wide as their longest cells.
    outcomes = {True: 'rejected', False: 'NOT rejected', None: '-'}
    titles = 'test;draws;degrees;G;p;bias seen from;bias below;control'
    table = [line.split(';') for line in (titles, ';'.join(['---'] * 8))]
    table += [
      f'{name};{test.num_draws};{test.degrees};{test.statistic:.1f};{p:.2g};'
      f'{seen:.4f};{bound:.4f};{outcomes[control]}'.split(';')
      for name, test, p, seen, bound, control, _ in self.checks
    ]
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    rows = [' | '.join(map(str.ljust, row, widths)) for row in table]
    return '\n'.join([*lines, '', *(f'| {row} |' for row in rows)])


def make(
  tests: Mapping[str, Counts],
  faults: Sequence[str],
  differences: tuple[str, ...] | None,
  false_alarm_rate: float,
) -> Report:
  """Makes tests by name; all else is as in the report."""
  rng, level = np.random.default_rng(0), false_alarm_rate / len(tests)
  checks = []
  for name, (rows, num, num_untested) in tests.items():
    test = goodness_of_fit.g_test(rows, num)
    seen, control = test.detectable(level, CONFIDENCE), None
    if test.degrees and not np.isinf(test.statistic):
      again = [goodness_of_fit.biased(rng, row, 2 * seen) for row in rows]
      control = goodness_of_fit.g_test(again, num).p_value <= level
    share = num_untested / max(1, num)
    checks.append(
      Check(
        name=name,
        test=test,
        p_value=min(1.0, test.p_value * len(tests)),
        detectable=min(1.0, seen + share),
        bound=min(1.0, test.bound(CONFIDENCE) + share),
        is_control_rejected=control,
        num_untested=num_untested,
      )
    )
  return Report(tuple(checks), tuple(faults), differences, false_alarm_rate)
