"""Times plain against speculative decoding of the same prompts.

Both are timed in one process, alternating and warm; times are medians. The
baseline is the fastest plain configuration. Times are of decoding, after the
prefill; prefill and compilation are reported separately.
"""

import argparse
import dataclasses
import functools
from collections.abc import Sequence

from specdec_jax.base import Tree
from specdec_jax.cli import from_flags, options, outputs
from specdec_jax.decoding import exact_bits
from specdec_jax.launch import numbers, progress
from specdec_jax.measure import benchmark, gamma_search, timing
from specdec_jax.measure import loops as loops_lib
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
  figures = _measure(placed, args.plain_dtypes, args.repeats)
  figures |= timing.configuration(vars(args), choices.drafter, decoder) | {
    'auto': chosen and vars(chosen),
    'doubts': doubts.of_speeds(figures) + doubts.of_load(),
    'is_simulated': is_simulated,
    'num_prompts': sum(len(batch.texts) for batch in batches),
  }
  if is_simulated:
    simulated = {'verification': 'simulated', 'lenience': None}
    figures |= simulated | {'simulate_alpha': args.simulate_alpha}
  if args.temperature or is_simulated:
    # Sampled texts share only a distribution, and simulated ones nothing.
    figures['identical'] = figures['first_divergence_margin'] = None
  return outputs.report(args, figures, _table(figures))


def _measure(
  placed: timing.Placed, plain_dtypes: Sequence[str], repeats: int
) -> benchmark.Figures:
  """Returns the figures of `benchmark.compare`, and their baseline."""
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
    configurations = {
      '': benchmark.drafted(loop, fixed=fixed, ends_early=bool(endings))
    }
    # T(1) and the expected tokens are of the target's dtype; the baseline of
    # the speedup is the fastest, such as bfloat16 for a float32 target.
    plain = candidates[decoder.model.dtype]
    fastest, tokens_per_second = loops_lib.fastest(candidates)
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
  [figures] = benchmark.compare(
    configurations,
    plain=plain,
    baseline=candidates[fastest],
    expected=expected,
    repeats=repeats,
    title='timing',
  ).values()
  return figures | {
    'baseline': f'autoregressive, {fastest}',
    'baseline_candidates_tokens_per_second': tokens_per_second,
    'compile_seconds': {
      'autoregressive': plain.compile_seconds,
      'speculative': loop.compile_seconds,
    },
  }


def _table(figures: benchmark.Figures) -> object:
  show = lambda x, digits=2: '-' if x is None else f'{x:.{digits}f}'
  # Such as 'smollm2-135m, int8, float32 (drafts bfloat16), cpu'.
  dtypes = ', '.join(filter(None, (figures['weights'], figures['dtype'])))
  if figures['draft_dtype'] != figures['dtype']:
    dtypes += f' (drafts {figures["draft_dtype"]})'
  title = f'{figures["model"]}, {dtypes}, {figures["device"]}'
  if figures['is_simulated']:
    title += f'\nSIMULATED acceptance of {figures["simulate_alpha"]:g}'
  plain_dtype = figures['baseline'].split(', ')[1]
  gamma = f'gamma {figures["gamma"]}'
  if figures['min_prob']:
    gamma += ' at most'
  if figures['tree']:
    gamma = f'a tree of {figures["gamma"]}'
  columns = ('', f'plain ({plain_dtype})', f'{figures["drafter"]}, {gamma}')
  count = lambda name: str(figures[name])
  speed = lambda configuration: show(
    figures[f'{configuration}_tokens_per_second'], 1
  )
  compiling = lambda configuration: show(
    figures['compile_seconds'][configuration], 1
  )
  plain, drafted = 'autoregressive', 'speculative'
  least, greatest = figures['speedup_range']
  only_drafted = {
    '  without a draft': count('short_target_runs'),
    'alpha (accepted / tested)': show(figures['alpha']),
    'accepted / drafted': show(figures['acceptance_per_drafted']),
    'alpha from mean length': show(figures['alpha_from_block_efficiency']),
    'block efficiency': show(figures['block_efficiency']),
    'c': show(figures['c'], 4),
    'T(gamma+1) / T(1)': show(figures['verify_cost_ratio']),
    '  without a draft / T(1)': show(figures['without_draft_cost_ratio']),
    'predicted speedup': show(figures['predicted_speedup']),
    'measured speedup': show(figures['speedup']),
    '  least and greatest turn': f'{least:.2f} to {greatest:.2f}',
    '  with the prefill': show(figures['end_to_end_speedup']),
  }
  rows = [
    ('tokens/s', speed(plain), speed(drafted)),
    ('tokens', count('autoregressive_tokens'), count('tokens')),
    ('target runs', count('autoregressive_target_runs'), count('target_runs')),
    *((name, '', value) for name, value in only_drafted.items()),
    ('compile seconds', compiling(plain), compiling(drafted)),
    (f'identical to plain {figures["dtype"]}', '', _identical(figures)),
  ]
  return outputs.table(columns, rows, title=title)


def _identical(figures: benchmark.Figures) -> str:
  if figures['is_simulated']:
    return 'not compared: simulated'
  if figures['identical'] is None:
    return 'not compared: sampled'
  if figures['identical']:
    return f'yes, {figures["compared_tokens"]} tokens'
  margin = figures['first_divergence_margin']
  if margin is None:
    return f'no, {figures["compared_tokens"]} tokens were expected'
  return f'no, first by a logit margin of {margin:.4f}'
