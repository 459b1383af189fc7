"""Block against token verification (Sun et al.): both lossless, and what each
makes of the same drafters (https://arxiv.org/abs/2403.10444)."""

import functools
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from experiments import report
from experiments.leviathan2023 import pairs
from experiments.leviathan2023.pairs import Pair, named
from experiments.report import Table
from experiments.sun2024 import formulas
from specdec_jax.assembly import rules
from specdec_jax.assembly.rules import Rule
from specdec_jax.decoding import speculative
from specdec_jax.measure import stopwatch
from specdec_jax.theory import estimates

RULES: dict[str, Rule] = {
  'token': rules.SpeculativeSampling(),
  'block': rules.Block(),
}
# The paper's example: P, Q and gamma.
TOY = ((1 / 3, 2 / 3), (2 / 3, 1 / 3), 2)
# From a secondary source, as (S) says.
TOY_ACCEPTED = {'token': '10/9 (S)', 'block': '11/9 (S)'}


def toy() -> Table:
  """Accepted tokens of the paper's example, by enumeration."""
  accepted = {
    'token': formulas.token_verification_accepted(*TOY),
    'block': formulas.block_verification_accepted(*TOY),
  }
  return Table(
    rows=[
      {
        'verification': name,
        'accepted': f'{value:.4f}',
        'paper: accepted': TOY_ACCEPTED[name],
      }
      for name, value in accepted.items()
    ]
  )


def tokens_per_run(
  given: Sequence[Pair],
  *,
  gammas: Sequence[int],
  num_examples: int,
  batch_size: int,
) -> Table:
  """Both rules on the same examples at T = 1, with intervals."""
  rows, notes = [], []
  for pair in given:
    gains = []
    found = stopwatch.together(
      {
        (gamma, name): functools.partial(
          _decode, pair, gamma, rule, num_examples, batch_size
        )
        for gamma in gammas
        for name, rule in RULES.items()
      }
    )
    for gamma in gammas:
      counts = {name: found[gamma, name] for name in RULES}
      token, block = (estimates.ratio(*counts[name]) for name in RULES)
      gain, interval = _gain(counts['token'], counts['block'])
      gains.append(gain)
      rows.append(
        named(pair)
        | {
          'gamma': gamma,
          'token': token[0],
          'token, 95%': report.interval(token[1]),
          'block': block[0],
          'block, 95%': report.interval(block[1]),
          'gain': f'{gain:+.1%}',
          'gain, 95%': report.interval(interval, '{:+.1%} to {:+.1%}'),
        }
      )
    notes.append(
      f'{pair.name}: block verification gains {gains[-1]:+.1%} at gamma '
      f'{gammas[-1]}.'
    )
  notes.append(
    'Tokens per target run at T = 1; examples are the sampling unit of '
    'intervals. At gamma 1 the two rules are the same.'
  )
  return Table(rows=rows, notes=notes)


def _decode(
  pair: Pair, gamma: int, rule: Rule, num_examples: int, batch_size: int
) -> tuple[np.ndarray, np.ndarray]:
  """Tokens and target runs of every example, float64 `[R]`."""
  decoder = pairs.decoder(pair, gamma, 1.0, rule)
  generate: Any = functools.partial(
    speculative.generate,
    method=decoder.method,
    max_len=pair.max_len,
  )

  @jax.jit
  def count(params: Any, prompt: Any) -> Any:
    return generate(params, jax.random.key(0), prompt).statistics

  counters = [
    jax.device_get(count(decoder.params, prompt))
    for prompt in pairs.prompts(pair, num_examples, batch_size)
  ]
  tokens = np.concatenate([each.num_tokens for each in counters])
  runs = np.concatenate([each.num_target_runs for each in counters])
  return tokens.astype(np.float64), runs.astype(np.float64)


def _gain(
  token: tuple[np.ndarray, np.ndarray], block: tuple[np.ndarray, np.ndarray]
) -> tuple[float, list[float] | None]:
  """Relative gain of block over token verification, and its interval.

  The variance of a logarithm of a ratio is that of the ratio over its square
  (delta method), and the two decodes have texts of their own.
  """
  found = [estimates.ratio(*counts) for counts in (token, block)]
  gain = found[1][0] / found[0][0] - 1
  if any(interval is None for _, interval in found):
    return gain, None
  halves = [(i[1] - i[0]) / 2 / value for value, i in found if i]
  half = float(np.linalg.norm(halves))
  ends = (np.log1p(gain) - half, np.log1p(gain) + half)
  return gain, [float(np.expm1(end)) for end in ends]
