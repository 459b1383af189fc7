"""Times plain against speculative decoding of the same prompts.

One process, alternating, warm, medians; the plain side is the fastest plain
configuration. Times are of decoding, after the prefill, which is reported
apart, as is compilation.
"""

import argparse
import dataclasses
import functools
import itertools
import sys
from collections.abc import Sequence
from typing import Any

import jax

from specdec_jax.assembly import auto_gamma, running
from specdec_jax.assembly import decoder as decoder_lib
from specdec_jax.assembly.decoder import Decoder
from specdec_jax.assembly.drafters import NoDrafter
from specdec_jax.base import Params, Prompt, Tree
from specdec_jax.cli import from_flags, options, outputs, suite
from specdec_jax.decoding.method import Method
from specdec_jax.launch import progress
from specdec_jax.measure import benchmark, stopwatch, trials
from specdec_jax.measure import sides as sides_lib
from specdec_jax.measure.sides import Side
from specdec_jax.measure.simulated import simulated_acceptance
from specdec_jax.text.prompts import Batch
from specdec_jax.theory.gamma_trials import ChosenGamma


def add_arguments(parser: argparse.ArgumentParser) -> None:
  options.add_models(parser)
  options.add_sampling(parser)
  options.add_prompts(parser, is_required=False)
  options.add_timing(parser).add_argument(
    '--simulate_alpha',
    metavar='ALPHA',
    type=options.share,
    help='SIMULATED: accept drafted tokens with this chance, whatever the '
    'models say, to time the loop apart from the drafter; the text is noise',
  )
  options.add_report(parser)
  suite.add_arguments(parser)


def run(args: argparse.Namespace) -> int:
  suite.check(args)
  if args.suite is not None:
    return suite.run(args)
  choices = from_flags.choices(args, may_be_auto=True)
  if args.drafter == 'none':
    raise ValueError('bench compares with plain decoding: choose a drafter')
  is_simulated = args.simulate_alpha is not None
  if is_simulated and isinstance(choices.drafter.length, Tree):
    raise ValueError(
      '--simulate_alpha accepts tokens of chains: leave out --tree and '
      '--num_continuations'
    )
  decoder, batches = from_flags.prepared(args, choices)
  if is_simulated:
    # By decree, and no row ends early.
    accept = functools.partial(simulated_acceptance, alpha=args.simulate_alpha)
    method = dataclasses.replace(decoder.method, verify_fn=accept, eos_id=(-1,))
    decoder = dataclasses.replace(decoder, method=method)
  choice = None
  if decoder.is_auto:
    choice = _choose(args, decoder, batches)
    decoder = decoder.at(choice.gamma)
    print(f'specdec: {choice.sentence}', file=sys.stderr)
    if not choice.gamma:
      found = configuration(args, decoder) | {'auto': vars(choice)}
      speeds = choice.tokens_per_second.items()
      tried = [(gamma, f'{speed:.1f}') for gamma, speed in speeds]
      columns = ('gamma', 'tokens/s with the prefill')
      return outputs.report(args, found, outputs.table(columns, tried))
  figures = _measure(args, decoder, batches) | configuration(args, decoder)
  figures['auto'] = choice and vars(choice)
  figures['doubts'] = benchmark.doubts(figures)
  figures['is_simulated'] = is_simulated
  if is_simulated:
    simulated = {'verification': 'simulated', 'lenience': None}
    figures |= simulated | {'simulate_alpha': args.simulate_alpha}
  figures['num_prompts'] = sum(len(batch.texts) for batch in batches)
  if args.temperature or is_simulated:
    # Both sides draw from one distribution, not the same tokens; or from none.
    figures['identical'] = figures['first_divergence_margin'] = None
  return outputs.report(args, figures, _table(figures), *_warnings(figures))


def _warnings(figures: dict[str, Any]) -> list[str]:
  """What stands below the table of figures that are in doubt."""
  if not figures['doubts']:
    return []
  told = '; '.join(figures['doubts'])
  return [f'These times are in doubt: {told}. Repeat on a quiet machine.']


def _choose(
  args: argparse.Namespace, decoder: Decoder, batches: Sequence[Batch]
) -> ChosenGamma:
  """What --gamma auto chooses for these batches, however few: they are
  decoded several times in any case."""
  settings = from_flags.settings(args)
  gammas = decoder.tried_gammas
  needed = trials.num_batches_needed(gammas, args.batch_size)
  many = list(itertools.islice(itertools.cycle(batches), needed))
  call = progress.interruptible
  with progress.waiting('measuring gamma'):
    return auto_gamma.choose(decoder, many, settings, call=call)[0]


def _measure(
  args: argparse.Namespace, decoder: Decoder, batches: Sequence[Batch]
) -> dict[str, Any]:
  params, key, rows, max_len = placed(args, decoder, batches)
  shared: dict[str, Any] = {'method': decoder.method, 'max_len': max_len}
  with progress.waiting('compiling'):
    candidates = plain_sides(args, decoder, params, rows, max_len)
    plain = candidates[args.dtype]
    full = decoder.drafter
    drafted = sides_lib.speculative_side(params, key, rows, **shared)
    full_width = sides_lib.full_width_side(
      params,
      key,
      rows,
      gamma=full.gamma,
      tree=full.tree,
      may_abstain=full.may_abstain,
      **shared,
    )
    fastest, tokens_per_second = sides_lib.fastest(candidates)
    is_adaptive = args.adaptive is not None
    drafter = full if full.tree else decoder.at(full.gamma).drafter
    propose = sides_lib.propose_programs(
      drafted, drafter, decoder.target, is_adaptive and not args.lookup
    )
  num_programs = (
    4 + (fastest != args.dtype) + drafter.may_abstain + len(propose)
  )
  with progress.bar('timing', num_programs * (args.repeats + 1)) as bar:
    figures = benchmark.compare(
      target=decoder.target,
      baseline=candidates[fastest],
      plain=plain,
      drafted=drafted,
      full_width=full_width,
      drafter=drafter,
      propose=propose,
      is_adaptive=is_adaptive,
      repeats=args.repeats,
      advance=bar.advance,
    )
  return figures | {
    'baseline': f'autoregressive, {fastest}',
    'baseline_candidates_tokens_per_second': tokens_per_second,
    'compile_seconds': {
      'autoregressive': plain.compile_seconds,
      'speculative': drafted.compile_seconds,
    },
  }


def placed(
  args: argparse.Namespace, decoder: Decoder, batches: Sequence[Batch]
) -> tuple[Params, jax.Array, list[Prompt], int]:
  """Weights, key and prompts on their devices, and `max_len`."""
  place = functools.partial(running.place, num_devices=args.num_devices)
  rows = [place(batch.prompt, is_batch=True) for batch in batches]
  max_len = running.max_length(batches[0], args.max_new_tokens)
  key = jax.random.key(args.seed)
  return place(decoder.params, is_batch=False), key, rows, max_len


def plain_sides(
  args: argparse.Namespace,
  decoder: Decoder,
  params: Params,
  rows: Sequence[Prompt],
  max_len: int,
) -> dict[str, Side]:
  """Plain decoding in the target's own dtype and in every one of
  --plain_dtypes, compiled; the last three arguments are those of `placed`."""
  sampling = decoder.sampling.to_probs(decoder.vocabulary.vocab_size)
  key, sides = jax.random.key(args.seed), {}
  for dtype in sorted({*args.plain_dtypes, args.dtype}):
    target, weights = decoder.target, params
    if dtype != args.dtype:
      other = plain(decoder, dtype)
      target = other.target
      weights = running.place(other.params, args.num_devices, is_batch=False)
    method = Method(
      target=target, logits_to_probs=sampling, eos_id=decoder.method.eos_id
    )
    sides[dtype] = sides_lib.plain_side(
      weights, key, rows, method=method, max_len=max_len
    )
  return sides


def plain(decoder: Decoder, dtype: str) -> Decoder:
  """The target in another dtype, to be decoded plainly."""
  model = dataclasses.replace(decoder.model, dtype=dtype)
  return decoder_lib.build(
    model,
    drafter=NoDrafter(),
    sampling=decoder.sampling,
    waiting=progress.waiting,
  )


def configuration(args: argparse.Namespace, decoder: Decoder) -> dict[str, Any]:
  """The settings of a run, for its report."""
  names = (
    *('verification', 'temperature', 'top_k', 'top_p', 'min_p', 'seed'),
    *('adaptive', 'draft_cost', 'batch_size', 'num_devices'),
    *('max_new_tokens', 'repeats', 'dtype'),
  )
  min_prob = getattr(decoder.choice, 'min_prob', None)
  of_rule = getattr(decoder.method.verify_fn, 'keywords', {})
  return {name: getattr(args, name) for name in names} | {
    'model': decoder.model.checkpoint,
    'drafter': args.draft_model or from_flags.drafter_name(args),
    'draft_dtype': args.draft_dtype or args.dtype,
    'gamma': decoder.drafter.gamma,
    'tree': decoder.drafter.tree and decoder.drafter.tree.parents,
    'min_prob': min_prob if args.adaptive else None,
    'lenience': from_flags.lenience(args),
    **{name: of_rule.get(name) for name in ('beta', 'tau')},
    'device': stopwatch.device_name(),
    'jax_version': jax.__version__,
  }


def _table(figures: dict[str, Any]) -> Any:
  show = lambda x, digits=2: '-' if x is None else f'{x:.{digits}f}'
  dtypes = figures['dtype']
  if figures['draft_dtype'] != dtypes:
    dtypes += f' (drafts {figures["draft_dtype"]})'
  title = f'{figures["model"]}, {dtypes}, {figures["device"]}'
  if figures['is_simulated']:
    title += f'\nSIMULATED acceptance of {figures["simulate_alpha"]:g}'
  plain_dtype = figures['baseline'].split(', ')[1]
  gamma = f'gamma {figures["gamma"]}'
  if figures['adaptive']:
    gamma = f'{figures["adaptive"]} {gamma} at most'
  if figures['tree']:
    gamma = f'a tree of {figures["gamma"]}'
  columns = ('', f'plain ({plain_dtype})', f'{figures["drafter"]}, {gamma}')
  count = lambda name: str(figures[name])
  speed = lambda side: show(figures[f'{side}_tokens_per_second'], 1)
  compiling = lambda side: show(figures['compile_seconds'][side], 1)
  plain, drafted = 'autoregressive', 'speculative'
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
    '  least and greatest turn': '{:.2f} to {:.2f}'.format(
      *figures['speedup_range']
    ),
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


def _identical(figures: dict[str, Any]) -> str:
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
