"""The tables of Xia et al. (arXiv 2203.16487), measured on a pair at hand.

Every function gives rows of cells by column; a cell of the paper stands beside
ours, and is empty where no value is known.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from experiments import common
from experiments.report import Cells
from experiments.xia2023 import checks, paper, ways
from experiments.xia2023.ways import (
  BLOCK,
  HEADS,
  ON_TARGET,
  Pair,
  Result,
  Way,
)
from specdec_jax.infer import quality
from specdec_jax.measure import stopwatch

FULL = 'full'
BEAM, GREEDY = 'beam 5', 'greedy'


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings:
  """How long and how much is measured.

  Attributes:
    gamma: k of every table but that of block sizes.
    gammas: block sizes.
    batch_sizes: of the batch table.
    num_timed: examples that are timed, at batch 1.
    repeats: of every timed batch; medians count.
    batch_size: of what is not timed.
  """

  gamma: int
  gammas: Sequence[int]
  batch_sizes: Sequence[int]
  num_timed: int
  repeats: int
  batch_size: int


def main_table(pair: Pair, settings: Settings) -> list[Cells]:
  """Beam 5, greedy, blockwise, strict and relaxed speculation; and, strict, a
  block drafter, which the paper has not."""
  compared: dict[str, Way] = {}
  if HEADS in pair.drafters:
    compared['blockwise'] = ways.speculate(pair, HEADS, None, 'strict')
  for rule in ('strict', 'top-3 tau 1', 'top-5 tau 3'):
    compared[rule] = ways.speculate(pair, FULL, settings.gamma, rule)
  if BLOCK in pair.drafters:
    compared[BLOCK] = ways.speculate(pair, BLOCK, None, 'strict')
  return _compare(pair, settings, compared, paper.MAIN)


def block_size_table(pair: Pair, settings: Settings) -> list[Cells]:
  """One Spec-Drafter with blocks of several sizes, whatever it was trained
  with."""
  compared = {
    f'k = {gamma}': ways.speculate(pair, FULL, gamma, 'top-3 tau 1')
    for gamma in settings.gammas
  }
  theirs = {f'k = {gamma}': cells for gamma, cells in paper.BLOCK_SIZE.items()}
  return _compare(pair, settings, compared, theirs)


def drafters_table(pair: Pair, settings: Settings) -> list[Cells]:
  """Heads, and every Spec-Drafter there is."""
  compared = {}
  for name in pair.drafters:
    gamma = None if name in ON_TARGET else settings.gamma
    compared[name] = ways.speculate(pair, name, gamma, 'top-3 tau 1')
  return _compare(pair, settings, compared, paper.DRAFTERS)


def verification_table(pair: Pair, settings: Settings) -> list[Cells]:
  """One Spec-Drafter under rules that relax more and more."""
  compared = {
    rule: ways.speculate(pair, FULL, settings.gamma, rule)
    for rule in ways.RULES
  }
  return _compare(pair, settings, compared, paper.VERIFICATION)


def batch_table(pair: Pair, settings: Settings) -> list[Cells]:
  """Latency of a batch against throughput; the paper has a figure of it, whose
  values are not known here."""
  table = []
  compared = {
    GREEDY: _plain(pair)[GREEDY],
    'strict': ways.speculate(pair, FULL, settings.gamma, 'strict'),
    'top-3 tau 1': ways.speculate(pair, FULL, settings.gamma, 'top-3 tau 1'),
  }
  for batch_size in settings.batch_sizes:
    num_rows = max(batch_size, settings.num_timed // batch_size * batch_size)
    rows = common.spread(pair.rows, num_rows)
    if len(rows) < batch_size:
      continue
    results = ways.decode(
      pair, compared, rows, batch_size=batch_size, repeats=settings.repeats
    )
    for name, result in results.items():
      table.append(
        {
          'way': name,
          'batch': batch_size,
          'ms per batch': 1e3 * float(np.mean(result.batch_seconds)),
          'sentences per second': len(result.texts) / result.seconds,
          'speed over greedy': results[GREEDY].seconds / result.seconds,
        }
      )
  return table


def positions_table(pair: Pair, settings: Settings) -> list[Cells]:
  """Shares of right guesses by position of a block, in the target's own texts.

  Each text is cut at a few places, drawn evenly, and each Spec-Drafter fills
  the block behind: all positions count, whether or not those before are right.
  """
  texts = _wholes(pair, {GREEDY: ways.greedy(pair)}, settings.batch_size)
  table = []
  for name in pair.drafters:
    if name in ON_TARGET:
      continue
    made = ways.decoder(pair, name, settings.gamma, ways.RULES['strict'])
    shares = checks.right_by_position(
      pair, made, texts[GREEDY].ids, settings.batch_size
    )
    by_place = {f'position {i}': each for i, each in enumerate(shares, 1)}
    table.append({'drafter': name, **by_place})
  return table


def behaviour_table(pair: Pair, settings: Settings) -> list[Cells]:
  """BLEU of each output against the target's own, greedy and by beam: how much
  of its behaviour a way keeps. Strict speculation keeps all of greedy's."""
  compared = {BEAM: _beam_5(pair), GREEDY: ways.greedy(pair)}
  for rule in ways.RULES:
    compared[rule] = ways.speculate(pair, FULL, settings.gamma, rule)
  results = _wholes(pair, compared, settings.batch_size)
  table = []
  for name, result in results.items():
    kept = {
      f"BLEU against the target's {own}": _bleu(
        results[own].texts, result.texts
      )
      for own in (GREEDY, BEAM)
    }
    same = np.mean(
      [a == b for a, b in zip(results[GREEDY].texts, result.texts, strict=True)]
    )
    theirs = paper.BEHAVIOUR.get(name, {})
    table.append(
      {
        'way': name,
        **kept,
        'equal to greedy': f'{100 * same:.1f}%',
        "paper: BLEU against the target's": theirs.get('kept', ''),
      }
    )
  return table


def checks_table(pair: Pair, settings: Settings) -> list[Cells]:
  """What has to hold whatever the drafter is worth; see `checks`."""
  return checks.checks(pair, FULL, settings.gamma, settings.batch_size)


# They compare texts, which rounding may change where two tokens are as likely.
EXACT = {'behaviour', 'positions', 'checks'}
TABLES: dict[str, tuple[str, Callable[[Pair, Settings], list[Cells]]]] = {
  'main': ('Main table', main_table),
  'block_size': ('Block size', block_size_table),
  'drafters': ('Drafter variants', drafters_table),
  'verification': ('Verification', verification_table),
  'batch': ('Batch size: latency against throughput', batch_table),
  'behaviour': ("The target's behaviour", behaviour_table),
  'positions': ('Right guesses by position', positions_table),
  'checks': ('Promises', checks_table),
}


def _compare(
  pair: Pair,
  settings: Settings,
  compared: dict[str, Way],
  theirs: dict[str, dict[str, str]],
) -> list[Cells]:
  """Quality and tokens per iteration of all examples, and times at batch 1 of
  some, each beside the paper's."""
  compared = _plain(pair) | compared
  whole = _wholes(pair, compared, settings.batch_size)
  timed = ways.decode(
    pair,
    compared,
    common.spread(pair.rows, settings.num_timed),
    batch_size=1,
    repeats=settings.repeats,
    time_drafts=True,
  )
  references = [row.example.targets for row in pair.rows]
  has_references = all(text is not None for text in references)
  plain_step = timed[GREEDY].loop_seconds / timed[GREEDY].num_tokens
  table = []
  for name in compared:
    cells = theirs.get(name, {})
    table.append(
      {
        'way': name,
        'BLEU': _bleu(references, whole[name].texts) if has_references else '',
        'paper: BLEU': cells.get('bleu', ''),
        'tokens per iteration': (
          '' if name == BEAM else whole[name].tokens_per_run
        ),
        'paper: tokens': cells.get('tokens', ''),
        'speed over beam 5': timed[BEAM].seconds / timed[name].seconds,
        'paper: speed': cells.get('speed', ''),
        'speed over greedy': timed[GREEDY].seconds / timed[name].seconds,
        'ms per sentence': 1e3 * timed[name].seconds / len(timed[name].texts),
        **_costs(timed[name], plain_step, is_greedy=name == GREEDY),
        'paper: draft ms': cells.get('draft', ''),
      }
    )
  return table


def _plain(pair: Pair) -> dict[str, Way]:
  """What all tables compare with."""
  return {
    BEAM: ways.fastest(_beam_5, pair),
    GREEDY: ways.fastest(ways.greedy, pair),
  }


def _beam_5(pair: Pair) -> Way:
  return ways.beam(pair, 5)


def _wholes(
  pair: Pair, compared: dict[str, Way], batch_size: int
) -> dict[str, Result]:
  """What every way makes of all examples."""
  return stopwatch.together(
    {
      name: functools.partial(_whole, pair, way, batch_size)
      for name, way in compared.items()
    }
  )


@functools.cache
def _whole(pair: Pair, way: Way, batch_size: int) -> Result:
  """What a way makes of all examples; several tables ask for it."""
  results = ways.decode(
    pair, {'': way}, pair.rows, batch_size=batch_size, is_timed=False
  )
  return results['']


def _costs(result: Result, plain_step: float, *, is_greedy: bool) -> Cells:
  """What an iteration costs, in milliseconds and in plain steps, and what it
  would have to yield to win over greedy decoding."""
  if result.draft_seconds is None:
    note = '1 plain step' if is_greedy else ''
    return {'draft ms': '', 'verify ms': '', 'cost per iteration': note}
  iteration = result.loop_seconds / result.num_runs
  verify = iteration - result.draft_seconds
  in_steps = [s / plain_step for s in (iteration, result.draft_seconds, verify)]
  verdict = 'wins' if result.tokens_per_run > in_steps[0] else 'loses'
  return {
    'draft ms': 1e3 * result.draft_seconds,
    'verify ms': 1e3 * verify,
    'cost per iteration': (
      f'{in_steps[0]:.1f} plain steps ({in_steps[1]:.1f} to draft, '
      f'{in_steps[2]:.1f} to verify) for {result.tokens_per_run:.2f} tokens: '
      f'{verdict}'
    ),
  }


def _bleu(references: Sequence[Any], texts: Sequence[str]) -> float:
  return quality.bleu(list(references), list(texts))['bleu']
