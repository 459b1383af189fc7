"""Times plain against speculative decoding of the same prompts.

Both are timed in one process, alternating and warm; times are medians. The
baseline is the fastest plain configuration. Times are of decoding, after the
prefill; prefill and compilation are reported separately.
"""

import argparse
import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any

from specdec_jax.base import Tree
from specdec_jax.cli import from_flags, options, outputs
from specdec_jax.decoding import exact_bits
from specdec_jax.launch import numbers, progress
from specdec_jax.measure import benchmark, comparison, gamma_search, timing
from specdec_jax.measure import loops as loops_lib
from specdec_jax.measure.comparison import Row
from specdec_jax.measure.simulated import simulated_acceptance
from specdec_jax.theory import doubts


def add_arguments(parser: argparse.ArgumentParser) -> None:
  options.add_models(parser)
  options.add_shared(options.add_sampling(parser), 'exact_bits')
  options.add_prompts(parser)
  options.add_shared(parser, 'forget')
  options.add_timing(parser).add_argument(
    '--simulate_alpha',
    metavar='ALPHA',
    type=numbers.share,
    help='SIMULATED: accept drafted tokens with this probability; the text is '
    'noise',
  )
  options.add_report(parser)


def run(args: argparse.Namespace) -> int:
  is_simulated = args.simulate_alpha is not None
  choices = from_flags.choices(args, may_be_auto=not is_simulated)
  if args.drafter == 'none':
    raise ValueError('bench compares with plain decoding: choose a drafter')
  if is_simulated and isinstance(choices.drafter.length, Tree):
    raise ValueError(
      '--simulate_alpha accepts tokens of chains: leave out --tree and '
      '--num_continuations'
    )
  decoder, batches, settings, _ = from_flags.prepared(args, choices)
  if is_simulated:
    # Accept at the given rate, and let no row end early.
    accept = functools.partial(simulated_acceptance, alpha=args.simulate_alpha)
    method = dataclasses.replace(decoder.method, verify_fn=accept, eos_id=(-1,))
    decoder = decoder.with_method(method)
  # Choose gamma. If it is 0, there is nothing left to compare.
  chosen = None
  if decoder.is_auto:
    chosen = gamma_search.measure(decoder, batches, settings, source='bench')
    decoder = decoder.at(chosen.gamma)
    progress.say(chosen.sentence)
    if not chosen.gamma:
      figures = timing.configuration(vars(args), choices.drafter, decoder)
      figures |= {'auto': vars(chosen), 'doubts': doubts.of_load()}
      speeds = chosen.tokens_per_second.items()
      rows = [(gamma, f'{speed:.1f}') for gamma, speed in speeds]
      columns = ('gamma', 'tokens/s with the prefill')
      return outputs.report(args, figures, outputs.table(columns, rows))
  # Time both.
  placed = timing.place(decoder, batches, settings)
  result = _measure(placed, args.plain_dtypes, args.repeats)
  measured = _figures(result)
  figures = measured | timing.configuration(
    vars(args), choices.drafter, decoder
  )
  figures |= {
    'auto': chosen and vars(chosen),
    'doubts': doubts.of_speeds(measured) + doubts.of_load(),
    'is_simulated': is_simulated,
    'num_prompts': sum(len(batch.texts) for batch in batches),
  }
  if is_simulated:
    simulated = {'verification': 'simulated', 'lenience': None}
    figures |= simulated | {'simulate_alpha': args.simulate_alpha}
  if args.temperature or is_simulated:
    # Sampled texts share only a distribution, and simulated ones nothing.
    figures['identical'] = figures['first_divergence_margin'] = None
  return outputs.report(args, figures, _table(result, figures))


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Result:
  """What was measured.

  Attributes:
    row: the comparison.
    plain_speeds: tokens per second of plain decoding by dtype.
    plain_dtype: the fastest of them.
    plain_compile_seconds: of plain decoding in the target's dtype.
    compile_seconds: of speculative decoding.
  """

  row: Row
  plain_speeds: dict[str, float]
  plain_dtype: str
  plain_compile_seconds: float
  compile_seconds: float


def _measure(
  placed: timing.Placed, plain_dtypes: Sequence[str], repeats: int
) -> _Result:
  """Times speculative decoding beside plain decoding in several dtypes."""
  decoder, method = placed.decoder, placed.decoder.method
  # To time drafting alone, a drafter whose drafts end early is replaced by the
  # same one without that, whose state is part of its own (unless it copies from
  # the text first).
  endings = {
    name: 0.0
    for name in ('min_prob', 'min_confidence')
    if getattr(decoder.recipe.drafter, name, 0)
  }
  fixed = None
  if endings and not getattr(decoder.recipe.drafter, 'lookup', False):
    choice = dataclasses.replace(  # type: ignore[type-var]
      decoder.recipe.drafter,
      **endings,
    )
    fixed = choice.make(
      decoder.parts.target_info, decoder.recipe.length
    ).drafter
  with progress.waiting('compiling'):
    candidates = placed.plain_loops(plain_dtypes)
    loop = loops_lib.speculative_loop(
      *placed.args, method=method, max_len=placed.max_len
    )
    drafted = benchmark.drafted(loop, fixed=fixed, ends_early=bool(endings))
    # T(1) and the expected tokens are of the target's dtype; the baseline of
    # the speedup is the fastest, such as bfloat16 for a float32 target.
    plain = candidates[decoder.model.dtype]
    fastest, plain_speeds = loops_lib.fastest(candidates)
    # With exact bits, tokens are compared with plain decoding at that width.
    expected = None
    if decoder.recipe.exact_bits:
      exact_bits.check(
        method,
        placed.params.target,
        placed.prompts[0],
        max_len=placed.max_len,
      )
      expected = loops_lib.like(loop, decoder.at(0).method)
  [row] = benchmark.compare(
    plain,
    [drafted],
    baseline=candidates[fastest],
    expected=expected,
    repeats=repeats,
    title='timing',
  )
  return _Result(
    row=row,
    plain_speeds=plain_speeds,
    plain_dtype=fastest,
    plain_compile_seconds=plain.compile_seconds,
    compile_seconds=loop.compile_seconds,
  )


def _figures(result: _Result) -> dict[str, Any]:
  """Returns what was measured as JSON has it."""
  return comparison.figures(result.row) | {
    'baseline': f'autoregressive, {result.plain_dtype}',
    'baseline_candidates_tokens_per_second': result.plain_speeds,
    'compile_seconds': {
      'autoregressive': result.plain_compile_seconds,
      'speculative': result.compile_seconds,
    },
  }


def _table(result: _Result, settings: Mapping[str, Any]) -> object:
  """Makes the table of a result; `settings` are those of the report."""
  show = lambda x, digits=2: '-' if x is None else f'{x:.{digits}f}'
  row = result.row
  plain, drafted, rates = row.baseline.loop, row.drafted.loop, row.rates
  # Such as 'smollm2-135m, int8, float32 (drafts bfloat16), cpu'.
  dtypes = ', '.join(filter(None, (settings['weights'], settings['dtype'])))
  if settings['draft_dtype'] != settings['dtype']:
    dtypes += f' (drafts {settings["draft_dtype"]})'
  title = f'{settings["model"]}, {dtypes}, {settings["device"]}'
  if settings['is_simulated']:
    title += f'\nSIMULATED acceptance of {settings["simulate_alpha"]:g}'
  gamma = f'gamma {row.drafter.gamma}'
  if settings['min_prob']:
    gamma += ' at most'
  if row.drafter.tree:
    gamma = f'a tree of {row.drafter.gamma}'
  columns = (
    '',
    f'plain ({result.plain_dtype})',
    f'{settings["drafter"]}, {gamma}',
  )
  least, greatest = row.speedup_range
  only_drafted = {
    '  without a draft': str(drafted.counts.short_iterations),
    'alpha (accepted / tested)': show(rates.alpha),
    'accepted / drafted': show(rates.acceptance_per_drafted),
    'alpha from mean length': show(row.alpha_from_block_efficiency),
    'block efficiency': show(rates.block_efficiency),
    'c': show(row.c, 4),
    'T(gamma+1) / T(1)': show(row.verify_cost_ratio),
    '  without a draft / T(1)': show(row.without_draft_cost_ratio),
    'predicted speedup': show(row.predicted_speedup),
    'measured speedup': show(row.speedup),
    '  least and greatest turn': f'{least:.2f} to {greatest:.2f}',
    '  with the prefill': show(row.end_to_end_speedup),
  }
  rows = [
    ('tokens/s', show(plain.speed, 1), show(drafted.speed, 1)),
    ('tokens', str(plain.counts.num_tokens), str(drafted.counts.num_tokens)),
    (
      'target runs',
      str(plain.counts.iterations),
      str(drafted.counts.iterations),
    ),
    *((name, '', value) for name, value in only_drafted.items()),
    (
      'compile seconds',
      show(result.plain_compile_seconds, 1),
      show(result.compile_seconds, 1),
    ),
    (f'identical to plain {settings["dtype"]}', '', _identical(row, settings)),
  ]
  return outputs.table(columns, rows, title=title)


def _identical(row: Row, settings: Mapping[str, Any]) -> str:
  """Says whether the tokens are those of plain decoding."""
  if settings['is_simulated']:
    return 'not compared: simulated'
  if settings['temperature']:
    return 'not compared: sampled'
  num_tokens = row.plain.loop.counts.num_tokens
  if row.sameness.identical:
    return f'yes, {num_tokens} tokens'
  margin = row.sameness.first_divergence_margin
  if margin is None:
    return f'no, {num_tokens} tokens were expected'
  return f'no, first by a logit margin of {margin:.4f}'
