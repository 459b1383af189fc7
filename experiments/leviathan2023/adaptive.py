"""Drafts that end early against the best fixed gamma, and the oracle."""

import dataclasses
from collections.abc import Callable

from experiments.leviathan2023 import measured
from experiments.leviathan2023.measured import Settings
from experiments.leviathan2023.pairs import TRAINED, Pair
from experiments.leviathan2023.timed import Sweep, Timed
from experiments.report import Cells

NOTE = (
  'T = 0, batch 1. Tokens per cost: the unit of cost is a plain step. At the '
  "paper's costs a target run costs 1, however many positions it scores, and a "
  'drafted token c; at the measured costs a run costs T(w) / T(1), where w is '
  'one more than the longest draft. The oracle drafts exactly '
  'what is accepted: 1 / (1 - alpha + alpha c). Tokens drafted beyond the end '
  'of a text are not counted.'
)


@dataclasses.dataclass(frozen=True, eq=False)
class _Way:
  """A way of decoding: what it is called, its widest draft, its counters."""

  name: str
  cap: int
  timed: Timed


def compare(
  pair: Pair, settings: Settings, found: Sweep
) -> tuple[list[Cells], str]:
  """Rows of the best fixed gammas, every threshold and the oracle, and a
  sentence of who wins."""
  parts = measured.costs(pair, 0.0, settings)
  c = parts.c(settings.max_gamma)
  alpha = measured.acceptance(pair, TRAINED, 0.0, settings)['alpha']

  def per_paper_cost(way: _Way) -> float:
    timed = way.timed
    return timed.num_tokens / (timed.num_runs + c * timed.num_drafted)

  def per_measured_cost(way: _Way) -> float:
    timed = way.timed
    later = timed.num_drafted - timed.num_runs
    drafting = (
      timed.num_runs * parts.first_draft_seconds
      + max(later, 0) * parts.draft_seconds
    )
    scoring = timed.num_runs * parts.verify_cost_ratio(way.cap)
    return timed.num_tokens / (scoring + drafting / parts.plain_seconds)

  fixed = [
    _Way(f'fixed {gamma}', gamma, timed) for gamma, timed in found.fixed.items()
  ]
  varying = [
    _Way(f'{name}, at most {cap}', cap, timed)
    for (name, cap), timed in found.adaptive.items()
  ]
  accounts: dict[str, Callable[[_Way], float]]
  accounts = {'paper': per_paper_cost, 'measured': per_measured_cost}
  best = {name: max(fixed, key=cost) for name, cost in accounts.items()}
  shown = list(dict.fromkeys([*best.values(), *varying]))
  rows = [_row(way, found.plain, accounts, best) for way in shown]
  # An oracle drafts the n tokens that will be accepted, alpha / (1 - alpha) of
  # them on average, and pays n c + 1 for n + 1 tokens (Sec. 3.5).
  oracle = 1 / (1 - alpha + alpha * c)
  rows.append(
    dict.fromkeys(rows[0], '')
    | {
      'gamma': 'oracle',
      "tokens per cost, paper's": oracle,
      'of the best fixed': oracle / per_paper_cost(best['paper']),
    }
  )
  return rows, _verdict(pair, varying, accounts, best)


def _row(
  way: _Way,
  plain: Timed,
  accounts: dict[str, Callable[[_Way], float]],
  best: dict[str, _Way],
) -> Cells:
  timed = way.timed
  in_paper, at_cost = accounts['paper'], accounts['measured']
  return {
    'gamma': way.name,
    'tokens': timed.num_tokens,
    'target runs': timed.num_runs,
    'drafted': timed.num_drafted,
    "tokens per cost, paper's": in_paper(way),
    'of the best fixed': in_paper(way) / in_paper(best['paper']),
    'tokens per cost, measured': at_cost(way),
    'of the best fixed, measured': at_cost(way) / at_cost(best['measured']),
    'measured speed': timed.speedup(plain),
  }


def _verdict(
  pair: Pair,
  varying: list[_Way],
  accounts: dict[str, Callable[[_Way], float]],
  best: dict[str, _Way],
) -> str:
  parts = []
  for name, cost in accounts.items():
    way = max(varying, key=cost)
    gain = cost(way) / cost(best[name]) - 1
    word = 'beats' if gain > 0 else 'does not beat'
    costs = "the paper's" if name == 'paper' else 'the measured'
    parts.append(
      f'at {costs} costs the best threshold ({way.name}) {word} the best fixed '
      f'gamma ({best[name].cap}): {gain:+.1%}'
    )
  return f'{pair.name}: {"; ".join(parts)}.'
