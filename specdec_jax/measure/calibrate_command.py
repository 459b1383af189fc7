"""Measures alpha on text that the target generates, and the costs of an
iteration's parts on this device, for `specdec plan --costs`.
"""

import argparse
import functools
from typing import Any

from specdec_jax.assembly import gamma_memory, running, settled_gamma
from specdec_jax.assembly.decoder import Decoder
from specdec_jax.assembly.gamma_memory import RememberedGamma
from specdec_jax.assembly.lengths import Fixed
from specdec_jax.assembly.rules import Block, Rule
from specdec_jax.cli import from_flags, options, outputs
from specdec_jax.launch import progress
from specdec_jax.measure import calibration, iteration_costs, stopwatch, timing
from specdec_jax.measure import loops as loops_lib
from specdec_jax.models import layers
from specdec_jax.theory import costs, doubts, trees
from specdec_jax.theory.acceptance import expected_tokens
from specdec_jax.theory.speedup import MARGIN, predicted_speedup


def add_arguments(parser: argparse.ArgumentParser) -> None:
  options.add_models(parser)
  options.add_sampling(parser)
  options.add_prompts(parser)
  options.add_timing(parser)
  options.add_report(parser, 'write the figures for `plan`')


def run(args: argparse.Namespace) -> int:
  choices = from_flags.choices(args)
  length, rule = choices.drafter.length, choices.rule
  ends_early = any(
    getattr(choices.drafter, name, 0.0) > 0
    for name in ('min_prob', 'min_confidence')
  )
  if not isinstance(length, Fixed) or not length.gamma or ends_early:
    raise ValueError(
      'calibrate measures chains of one gamma: choose a drafter, and leave out '
      '--min_prob, --min_confidence, --tree and --num_continuations'
    )
  if isinstance(rule, Block):
    raise ValueError(
      'calibrate measures how often a token is accepted, and --verification '
      'block judges whole drafts: leave it out'
    )
  # Measure acceptance.
  decoder, batches, settings, _ = from_flags.prepared(args, choices)
  placed = timing.place(decoder, batches, settings)
  gamma = length.gamma
  figures = _acceptance(placed, rule, args.max_new_tokens)
  # Time the parts of an iteration.
  with progress.waiting('compiling'):
    candidates = placed.plain_loops(args.plain_dtypes, 1)
    fastest, _ = loops_lib.fastest(candidates)
    cost_programs = iteration_costs.cost_programs(
      placed.params,
      placed.rng_key,
      placed.prompts[0],
      method=decoder.method,
      drafters={1: decoder.at(1).drafter, gamma: decoder.drafter},
      max_len=placed.max_len,
      plain=candidates[fastest],
    )
  timed = stopwatch.alternate(
    cost_programs.programs, args.repeats, title='timing'
  )
  figures |= cost_programs.costs(*timed)
  # Costs relative to T(1), and doubts.
  target, drafter = map(layers.num_params, decoder.params)
  figures['c_hat'] = drafter / target
  parts = costs.Costs.among(figures)
  # With `lookup`, copied tokens may replace those of the network.
  has_lookup = getattr(decoder.recipe.drafter, 'lookup', False)
  is_one_by_one = decoder.parts.drafting.chain is not None and not has_lookup
  # c is a mean over gamma tokens: the first one costs more than the others.
  figures |= timing.configuration(vars(args), choices.drafter, decoder) | {
    'kind': costs.KIND,
    'source': 'measured',
    'c': parts.c(gamma),
    'verify_cost_ratio': parts.verify_cost_ratio(gamma),
    'plain_dtype': fastest,
    'doubts': [
      *doubts.of_costs(figures, is_one_by_one=is_one_by_one),
      *doubts.of_turns(figures['turn_seconds'], is_short=True),
      *doubts.of_load(),
    ],
  }
  if not figures['doubts'] and rule.judge(decoder.sampling).is_lossless:
    remembered = _remember(decoder, settings, figures, parts)
    progress.say(remembered.sentence)
  return outputs.report(args, figures, _table(figures))


def _remember(
  decoder: Decoder,
  settings: running.DecodeSettings,
  figures: dict[str, Any],
  parts: costs.Costs,
) -> RememberedGamma:
  """Remembers the gamma that acceptance and costs predict to be fastest."""
  speeds = {0: 1.0}
  for gamma in range(1, decoder.drafter.gamma + 1):
    tokens = float(expected_tokens(figures['alpha'], gamma))
    ratio = parts.verify_cost_ratio(gamma)
    speed = predicted_speedup(tokens, gamma, parts.c(gamma), ratio)
    speeds[gamma] = float(speed)
  fastest = max(speeds, key=speeds.__getitem__)
  if speeds[fastest] <= 1 + MARGIN:
    fastest = 0
  remembered = RememberedGamma(
    gamma=fastest,
    source='calibrate',
    reason=f'{speeds[fastest]:.2f} times plain decoding is predicted',
  )
  place = settled_gamma.place(decoder, settings.num_rows, settings.num_devices)
  gamma_memory.remember(place, remembered)
  return remembered


def _acceptance(
  placed: timing.Placed, rule: Rule, num_tokens: int
) -> dict[str, Any]:
  """Measures how often tokens are accepted; for trees also by rank."""
  decoder, params = placed.decoder, placed.params
  is_lossless = rule.judge(decoder.sampling).is_lossless
  relaxed: dict[str, Any] = {}
  if not is_lossless:
    verify_fn = decoder.method.verify_fn
    passes = functools.partial(calibration.passes_rule, verify_fn=verify_fn)
    relaxed = {'verify_fn': verify_fn, 'share_fns': [passes]}
  shared: dict[str, Any] = {
    'method': decoder.method,
    'max_len': placed.max_len,
    'num_tokens': num_tokens,
  }
  # Acceptance by rank is for choosing the shape of a tree. Trees of copied text
  # have a fixed shape, and rules for trees are lossless.
  is_ranked = is_lossless and hasattr(decoder.recipe.drafter, 'tree')
  [[overlaps]] = calibration.overlaps(
    params._replace(drafter=[params.drafter]),
    placed.rng_key,
    placed.prompts,
    drafters=[decoder.at(1).drafter],
    title='measuring acceptance',
    **shared,
    **relaxed,
  )
  # With gamma 1 every prefix counts, whatever was accepted before it.
  figures = calibration.acceptance(overlaps, max_gamma=decoder.drafter.gamma)
  figures['rank_rates'] = None
  if is_ranked:
    ranked = decoder.ranked_drafter(trees.NUM_RANKS)
    title = 'measuring acceptance by rank'
    rates = calibration.rank_rates(
      *placed.args, drafter=ranked, title=title, **shared
    )
    figures['rank_rates'] = rates.tolist()
  return figures


def _table(figures: dict[str, Any]) -> object:
  interval = figures['alpha_interval']
  shown = '-' if interval is None else '{:.3f} to {:.3f}'.format(*interval)
  lag = figures['autocorrelation'][0]
  ms = lambda seconds: f'{1e3 * seconds:.3f} ms'
  # Of widths (1, 5, 9) these are T(1) and T(9).
  plain, *_, scoring = figures['target_seconds']
  ranks = []
  if figures['rank_rates']:
    rates = ', '.join(f'{rate:.3f}' for rate in figures['rank_rates'][:4])
    ranks = [('  by rank', rates)]
  widest = figures['widths'][-1]
  rows = [
    ('alpha', f'{figures["alpha"]:.3f}'),
    ('  95% interval, by rows', shown),
    ('  prefixes, rows', f'{figures["num_prefixes"]}, {figures["num_rows"]}'),
    ('  prefixes without a guess', f'{figures["abstained"]:.1%}'),
    *ranks,
    ('  correlation of neighbours', '-' if lag is None else f'{lag:.2f}'),
    (f'T(1), a plain step in {figures["plain_dtype"]}', ms(plain)),
    (f'T({widest})', ms(scoring)),
    ('  the target call by itself', ms(figures['extend_seconds'])),
    (f'T({widest}) / T(1)', f'{figures["verify_cost_ratio"]:.3f}'),
    ('first drafted token', ms(figures['first_draft_seconds'])),
    ('further drafted token', ms(figures['draft_seconds'])),
    ('c', f'{figures["c"]:.4f}'),
    ('loop, beyond its parts', ms(figures['loop_seconds'])),
    ('decode, beyond its loop', ms(figures['launch_seconds'])),
    ('the same of plain decoding', ms(figures['plain_launch_seconds'])),
  ]
  names = ('model', 'drafter', 'weights', 'dtype', 'device')
  title = ', '.join(figures[name] for name in names if figures[name])
  return outputs.table(('', 'measured'), rows, title=title)
