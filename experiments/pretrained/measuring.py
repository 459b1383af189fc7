"""All figures of a pair's cards, in the order in which they are measured."""

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

from experiments import common
from experiments.pretrained import measurement
from experiments.pretrained.measurement import (
  TEMPERATURES,
  Decoded,
  Draft,
  Figures,
  Setting,
)
from specdec_jax.theory import estimates

_BENCH = (
  *('device', 'num_prompts', 'batch_size', 'gamma', 'identical'),
  *('autoregressive_tokens_per_second', 'speculative_tokens_per_second'),
  *('speedup', 'predicted_speedup', 'end_to_end_speedup'),
)


def measure(args: argparse.Namespace) -> dict[str, Figures]:
  """Measures what goes into the card of each model: by its name, section and
  task.

  Raises:
    ValueError: if the models do not fit together.
  """
  started = time.time()
  bench = _bench(args)
  setting = measurement.read(
    args.target,
    args.task,
    inputs_field=args.inputs_field,
    prefix=args.prefix,
    inputs_length=args.inputs_length,
    max_new_tokens=args.max_new_tokens,
    batch_size=args.batch_size,
  )
  names = [args.drafter, *filter(None, [args.plain_drafter])]
  drafts = [measurement.read_draft(name, setting) for name in names]
  _say(started, f'{len(setting.batches)} batches; decoding them plainly')
  greedy = measurement.plainly(setting, TEMPERATURES['greedy'])
  target: Figures = {}
  if args.metric:
    target |= measurement.judge(setting, greedy, args.metric)
  if not setting.layout.is_encoder_decoder:
    target |= measurement.nats_per_token(setting, args.task, args.inputs_field)
  drafted: Figures = {'target': args.target, 'gamma': args.gamma}
  _say(started, 'asking the drafters')
  drafted['alpha'] = _alphas(setting, drafts, greedy)
  _say(started, 'decoding speculatively')
  # What another draft model's alpha is, is known by now.
  decoded = drafts[:1] if drafted['alpha'] else drafts
  drafted['decoding'] = [
    _decoding(setting, draft, args.gamma, greedy) for draft in decoded
  ]
  if bench is not None:
    drafted['bench'] = bench
  task, provenance = measurement.provenance(args.task, started)
  shared = {
    'examples': len(greedy.texts),
    'prefix': args.prefix,
    'max_new_tokens': args.max_new_tokens,
    'batch_size': args.batch_size,
    **provenance,
  }
  return {
    args.target: {'test': {task: target | shared}} if target else {},
    args.drafter: {'drafting': {task: drafted | shared}},
  }


def _say(started: float, what: str) -> None:
  print(f'{time.time() - started:.0f} s: {what}', file=sys.stderr, flush=True)


def _decoding(
  setting: Setting, draft: Draft, gamma: int, greedy: Decoded
) -> Figures:
  """Counts in how many rows greedy speculative decoding differs from greedy
  decoding, and what it accepts."""
  found = measurement.speculatively(setting, draft, gamma)
  pairs = zip(greedy.texts, found.texts, strict=True)
  different = sum(not np.array_equal(a, b) for a, b in pairs)
  counters = found.counters
  # By row and position of a draft.
  accepted, tested = counters['accepted'], counters['tested']
  by_position = accepted.sum(0) / np.maximum(tested.sum(0), 1)
  return {
    'drafter': common.short(draft.name),
    'accepted_per_tested': _ratio(accepted.sum(1), tested.sum(1)),
    'accepted_by_position': by_position.round(4).tolist(),
    'tokens_per_target_run': _ratio(counters['tokens'], counters['runs']),
    'rows': len(found.texts),
    'rows_that_differ_from_greedy': different,
  }


def _alphas(
  setting: Setting, drafts: list[Draft], greedy: Decoded
) -> Figures | None:
  """Measures alpha of each draft model, and of two the difference; greedy and
  sampled.

  A Spec-Drafter has no distribution to ask for.
  """
  if any(draft.model is None for draft in drafts):
    return None
  figures: Figures = {}
  for name, temperature in TEMPERATURES.items():
    texts = greedy
    if temperature:
      texts = measurement.plainly(setting, temperature)
    sums, counts = measurement.alphas(setting, drafts, texts, temperature)
    figures[name] = {
      'temperature': temperature,
      'prefixes': int(counts.sum()),
      'drafters': [_ratio(each, counts) for each in sums],
    }
    if len(drafts) == 2:
      figures[name]['difference'] = _ratio(sums[0] - sums[1], counts)
  return figures


def _bench(args: argparse.Namespace) -> Figures | None:
  """Reads the speeds of --bench, which must be of this pair."""
  if args.bench is None:
    return None
  figures = json.loads(Path(args.bench).read_text(encoding='utf-8'))
  pair = figures['model'], figures['drafter']
  if pair != (args.target, args.drafter):
    raise ValueError(f'{args.bench} is of {" and ".join(pair)}')
  return {name: figures[name] for name in _BENCH}


def _ratio(sums: Any, counts: Any) -> Figures:
  value, interval = estimates.ratio(sums, counts)
  return {'value': value, 'interval': interval}
