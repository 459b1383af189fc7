"""Audits an engine: compares its samples with its model's probabilities."""

import itertools
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from specdec_jax.audit import report
from specdec_jax.audit.goodness_of_fit import Cells, pool
from specdec_jax.audit.report import Counts, Report

Tokens = tuple[int, ...]
NextProbs = Callable[[Tokens], np.ndarray]
# Prefixes that were reached less often share cells.
_MIN_VISITS = 100
# Tests of rows of a batch count outcomes by rank, the rarest together.
_MAX_RANKS = 256
# The most prefixes that are tested, per prompt and token.
MAX_PREFIXES = 2000


def audit(
  sample: Callable[[Tokens, int, int], Sequence[Sequence[int]] | np.ndarray],
  next_probs: NextProbs,
  prompts: Sequence[Sequence[int]],
  *,
  num_tokens: int | Sequence[int],
  num_draws: int = 50_000,
  seeds: Sequence[int] = (0, 1),
  eos_ids: Sequence[int] = (),
  greedy: Callable[[Tokens], Sequence[int]] | None = None,
  num_rows: int = 64,
  false_alarm_rate: float = 1e-4,
) -> Report:
  """Tests whether an engine's sampler follows its own model, prefix by prefix.

  Given how often a prefix was reached, the tokens after it should be draws from
  `next_probs(prefix)`: a row of a G-test. Rarely reached prefixes are pooled
  into one row, by rank of the next token; the report counts draws that follow
  none of a position's 2000 commonest, which are not tested. Positions have
  tests, and so have whole texts, per seed and together: sums of G. As biases of
  two rows of a batch may cancel out, rows are also tested apart.

  Args:
    sample: `(prompt, num, seed)` to `num` continuations of `num_tokens` tokens,
      without the prompt, or shorter ones that end with EOS; alternatively to an
      array `[num, L]`, in which a negative id ends a row.
    next_probs: a prefix, prompt included, to the probabilities `[V]` with which
      the next token is sampled: after temperature, top-k and so on.
    prompts: token ids of each prompt.
    num_tokens: per continuation, one number for all prompts or one for each.
    num_draws: continuations per prompt and seed.
    seeds: seeds, tested one by one and all together.
    eos_ids: ids that end a continuation.
    greedy: a prompt to the engine's greedy tokens, which are compared with the
      argmax of `next_probs`. Differences are reported but do not reject.
    num_rows: the rows of the engine's batches: draw i of a prompt is decoded in
      row `i % num_rows`. Halved while a row has fewer than 100 draws; every
      second row is tested apart from the others in any case. 1 for an engine
      that decodes text by text.
    false_alarm_rate: of all tests together.

  Raises:
    ValueError: if `sample` ignores its seed, a token is not below V, there is
      nothing to draw, a number is out of range, or `next_probs` does not return
      probabilities.
  """
  if isinstance(num_tokens, int):
    num_tokens = [num_tokens] * len(prompts)
  counts = len(prompts), len(seeds), num_draws, num_rows, *num_tokens
  if min(counts) < 1 or len(num_tokens) != len(prompts):
    raise ValueError(
      'give prompts, seeds, and num_draws, num_rows and num_tokens of at least '
      f'1, the last for all of {len(prompts)} prompts or for each'
    )
  if not 0 < false_alarm_rate < 1:
    raise ValueError(
      f'false_alarm_rate should be above 0 and below 1, got {false_alarm_rate}'
    )
  tests: dict[str, Counts] = {}
  faults, differences = [], []
  batches = _batches(num_rows, num_draws * len(seeds))
  names = [
    *(f'sequences, seed {seed}' for seed in seeds if len(seeds) > 1),
    'sequences',
    *(f'{num} rows apart' for num in batches),
  ]
  for i, prompt in enumerate(map(tuple, prompts)):
    name = f'prompt {i + 1}'
    tokens = [
      _padded(sample(prompt, num_draws, seed), num_tokens[i]) for seed in seeds
    ]
    for first, second in itertools.combinations(tokens, 2):
      # Draws that are all equal are allowed: a model may have one answer only.
      if np.array_equal(first, second) and (first != first[0]).any():
        raise ValueError('two seeds gave the same draws: sample ignores seeds')
    wrong = sum(_num_wrong_ends(sequences, eos_ids) for sequences in tokens)
    if wrong:
      faults.append(f'{name}: {wrong} continuations end too early or too late')
    if greedy is not None:
      differences += _differences(prompt, greedy(prompt), next_probs)
    # The last column only tells whether a continuation went on too long.
    positions = [
      _counted(tokens, position, prompt, next_probs, batches)
      for position in range(num_tokens[i])
    ]
    for position, counted in enumerate(positions, start=1):
      tests[f'{name}, token {position}'] = counted.of_all
    of_tests = [
      [
        *(counted.of_seeds if len(seeds) > 1 else ()),
        counted.of_all,
        *counted.of_batches,
      ]
      for counted in positions
    ]
    for test, parts in zip(names, zip(*of_tests, strict=True), strict=True):
      tests[f'{name}, {test}'] = _of_sequences(parts)
  compared = None if greedy is None else tuple(differences)
  return report.make(tests, faults, compared, false_alarm_rate)


def _batches(num_rows: int, num_draws: int) -> list[int]:
  """Lists the numbers of rows to test apart from each other."""
  if num_rows == 1:
    return []
  while num_rows % 2 == 0 and num_draws < _MIN_VISITS * num_rows:
    num_rows //= 2
  return sorted({2, num_rows} - {1})


def _padded(
  sequences: Sequence[Sequence[int]] | np.ndarray, num_tokens: int
) -> np.ndarray:
  """Pads continuations with -1 to an array `[N, L + 1]`."""
  padded = np.full((len(sequences), num_tokens + 1), -1)
  for row, tokens in zip(padded, sequences, strict=True):
    row[: len(tokens)] = tokens[: num_tokens + 1]
  return padded


def _num_wrong_ends(tokens: np.ndarray, eos_ids: Sequence[int]) -> int:
  """Counts the rows `[N, L + 1]` that end neither at EOS nor after L tokens."""
  # With L = 3 and EOS 1, [5, 1, -1, -1] must end after its first EOS, with 2
  # tokens, and [5, 6, 7, -1], which has none, with 3.
  is_eos = np.isin(tokens[:, :-1], eos_ids)
  lengths = np.where(is_eos.any(1), is_eos.argmax(1) + 1, tokens.shape[1] - 1)
  return int(((tokens >= 0).sum(1) != lengths).sum())


def _of_sequences(parts: Sequence[Counts]) -> Counts:
  """Joins the counts of all positions of the same sequences."""
  num_sequences = parts[0].num_draws
  # A sequence may be untested at several positions.
  num_untested = min(num_sequences, sum(part.num_untested for part in parts))
  rows = [row for part in parts for row in part.rows]
  return Counts(rows, num_sequences, num_untested)


class _Counted(NamedTuple):
  """Counts at one position: of each seed, of all seeds, and by row of the
  engine's batches, for each number of rows."""

  of_seeds: Sequence[Counts]
  of_all: Counts
  of_batches: Sequence[Counts]


def _counted(
  tokens: Sequence[np.ndarray],
  position: int,
  prompt: Tokens,
  next_probs: NextProbs,
  batches: Sequence[int],
) -> _Counted:
  """Counts the tokens after each prefix; `batches` are numbers of rows."""
  # The seed of each draw, such as [0, 0, 1, 1, 1] for 2 and 3 draws, and the
  # index of the draw: [0, 1, 0, 1, 2].
  seeds = np.repeat(np.arange(len(tokens)), [*map(len, tokens)])
  draw_ids = np.concatenate([np.arange(len(array)) for array in tokens])
  joined = np.concatenate(tokens)
  is_there = joined[:, position] >= 0
  joined, seeds, draw_ids = (
    joined[is_there],
    seeds[is_there],
    draw_ids[is_there],
  )
  if position:
    # Sort draws by prefix, so that equal prefixes are adjacent.
    order = np.lexsort(joined[:, :position].T)
    joined, seeds, draw_ids = joined[order], seeds[order], draw_ids[order]
  # Group draws by prefix: of 11, 11, 12, 20 groups begin at 2 and 3.
  is_new = (joined[1:, :position] != joined[:-1, :position]).any(1)
  starts = np.flatnonzero(is_new) + 1
  parts = [np.split(array, starts) for array in (joined, seeds, draw_ids)]
  groups = sorted(zip(*parts, strict=True), key=lambda part: -len(part[0]))
  tested = groups[:MAX_PREFIXES] if len(joined) else []
  # Count the tokens after every prefix, by seed and by row.
  rows: list[list[Cells]] = [[] for _ in range(len(tokens) + 1)]
  by_rank: dict[int, np.ndarray] = {}
  row_tables = [np.zeros((2, num, _MAX_RANKS)) for num in batches]
  for group, group_seeds, group_draws in tested:
    prefix, after = group[0, :position].tolist(), group[:, position]
    probs = np.asarray(next_probs((*prompt, *prefix)), np.float64)
    # NaN fails both comparisons; probabilities need not sum to 1.
    if not ((probs >= 0) & (probs < np.inf)).all():
      raise ValueError(
        f'next_probs of {(*prompt, *prefix)} are no probabilities: they range '
        f'from {probs.min():g} to {probs.max():g}'
      )
    if after.max() >= len(probs):
      raise ValueError(f'token {after.max()} is not below V = {len(probs)}')
    ranks = np.argsort(-probs, kind='stable')
    for table in row_tables:
      _add_by_row(table, group_draws, after, probs, ranks)
    for seed in np.unique([*group_seeds, len(tokens)]):
      is_of_seed = (group_seeds == seed) | (seed == len(tokens))
      observed = np.bincount(after[is_of_seed], minlength=len(probs))
      row, num = pool(observed, probs), observed.sum()
      if 0 in row.expected or (len(row.expected) > 1 and num >= _MIN_VISITS):
        rows[seed].append(row)
      else:
        # Rare prefixes are pooled by the rank of the next token: the likeliest
        # of every prefix, the second, and so on.
        both = np.stack([observed, probs * (num / probs.sum())])
        by_rank[seed] = by_rank.get(seed, 0) + both[:, ranks]
  for seed, ranked in by_rank.items():
    rows[seed].append(pool(*ranked))
  # Draws after prefixes that were not tested.
  rare = [seeds[:0]]
  for _, group_seeds, _ in groups[MAX_PREFIXES:]:
    rare.append(group_seeds)
  # Draws and untested draws, by seed and in total.
  num_draws, num_rare = (
    [*np.bincount(ids, minlength=len(tokens)).tolist(), len(ids)]
    for ids in (seeds, np.concatenate(rare))
  )
  *of_seeds, of_all = map(Counts, rows, num_draws, num_rare)
  of_batches = [
    of_all._replace(
      rows=[pool(*row) for row in table.swapaxes(0, 1) if row[0].any()]
    )
    for table in row_tables
  ]
  return _Counted(of_seeds, of_all, of_batches)


def _add_by_row(
  table: np.ndarray,
  draw_ids: np.ndarray,
  tokens: np.ndarray,
  probs: np.ndarray,
  ranks: np.ndarray,
) -> None:
  """Adds the tokens `[N]` of a prefix to observed and expected counts, float64
  `[2, rows, _MAX_RANKS]`, by the rank of the token.

  `draw_ids[N]` modulo the number of rows are the rows of draws; `ranks` are the
  ids of `probs[V]`, the likeliest first.
  """
  num_rows = table.shape[1]
  places = np.empty_like(ranks)
  places[ranks] = np.arange(len(ranks))
  last = _MAX_RANKS - 1
  sorted_probs = probs[ranks] / probs.sum()
  expected = np.zeros(_MAX_RANKS)
  expected[: len(probs)] = sorted_probs[:_MAX_RANKS]
  expected[last] += sorted_probs[_MAX_RANKS:].sum()
  of_row = draw_ids % num_rows
  observed = np.minimum(places[tokens], last)
  np.add.at(table[0], (of_row, observed), 1)
  table[1] += np.bincount(of_row, minlength=num_rows)[:, None] * expected


def _differences(
  prompt: Tokens, tokens: Sequence[int], next_probs: NextProbs
) -> list[str]:
  """Describes the first greedy token that is not the model's likeliest."""
  for i, token in enumerate(tokens):
    prefix = (*prompt, *map(int, tokens[:i]))
    probs = np.asarray(next_probs(prefix))
    if token != (best := probs.argmax()):
      shown = f'probabilities {probs[token]:.6f} and {probs[best]:.6f}'
      return [f'after {list(prefix)} comes {token}, not {best}: {shown}']
  return []
