"""Measures what decoding costs on this accelerator, also for large models.

    python -m experiments.accelerator

Weights are random if a pair says so, and acceptance is SIMULATED: the costs and
speeds of the loop depend on neither. The results become a chapter of
experiments/RESULTS.md (`python -m experiments.results`), named after the
device. See README.md.
"""

import argparse
import dataclasses
import functools
import math
import os
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from experiments import common, report
from experiments.accelerator import cache
from experiments.report import Cells, Table
from specdec_jax.assembly import decoder as decoder_lib
from specdec_jax.assembly import packing, running, usual
from specdec_jax.assembly.decoder import Decoder
from specdec_jax.assembly.drafters import (
  DRAFTERS,
  DrafterChoice,
  PromptLookup,
  Quantized,
)
from specdec_jax.assembly.models import Model
from specdec_jax.base import Prompt
from specdec_jax.launch import platforms
from specdec_jax.measure import iteration_costs, stopwatch
from specdec_jax.measure import loops as loops_lib
from specdec_jax.measure.simulated import simulated_acceptance
from specdec_jax.models import presets
from specdec_jax.planning import planner
from specdec_jax.sharding import mesh as mesh_lib
from specdec_jax.theory.costs import Costs

MODULE = 'experiments.accelerator'
# A target, as the integers after an @, and after a slash its draft model or
# the bits in which it drafts for itself; without a slash, prompt lookup.
PAIRS = (
  'random:t5_1_1_xxl/random:t5_1_1_small',
  'random:t5_1_1_xxl/random:t5_1_1_base',
  'random:t5_1_1_xxl/random:t5_1_1_large',
  'smollm2-135m',
  'random:llama_3_1_8b/4bits',
  'random:llama_3_1_8b@int8',
  'random:gemma4_e4b/random:gemma4_e4b_assistant',
  'random:gemma4_26b_a4b/random:gemma4_26b_a4b_assistant',
  'random:gemma4_31b/random:gemma4_31b_assistant',
)
# Positions of the target calls that are timed.
WIDTHS = (1, 2, 4, 8, 16)
_TEXT = 'the quick brown fox jumps over the lazy dog and runs on. '


def main(argv: Sequence[str] | None = None) -> int:
  argv = sys.argv[1:] if argv is None else argv
  args = _parser().parse_args(argv)
  return common.finish('accelerator', lambda: _run(args, argv))


def _run(args: argparse.Namespace, argv: Sequence[str]) -> None:
  slug = re.sub(r'\W+', '_', platforms.device_name()).strip('_').lower()
  folder = Path(args.output) / slug
  for pair in args.pairs if 'pairs' in args.tables else ():
    if reason := _lack_of_room(_outline(pair, args)):
      print(f'accelerator: {pair} is skipped: {reason}', file=sys.stderr)
      continue
    report.measure(
      (MODULE, argv),
      folder,
      re.sub(r'\W+', '_', pair),
      f'{pair.replace("/", " with ")}, {args.dtype}',
      functools.partial(table, pair, args),
    )
  if 'cache' in args.tables:
    name = re.sub(r'\W+', '_', args.cache_model)
    report.measure(
      (MODULE, argv),
      folder,
      f'cache_{name}_{args.cache_dtype}',
      f'{args.cache_model}, {args.cache_dtype}: the used part of the cache',
      functools.partial(cache_table, args),
    )


def table(pair: str, args: argparse.Namespace) -> Table:
  """Makes a row for each batch size of a pair."""
  decoder = _load(pair, args)
  rows: list[Cells] = [
    _row(decoder, batch_size, args) for batch_size in args.batch_sizes
  ]
  num_bytes = mesh_lib.tree_bytes(decoder.params.target)
  return Table(
    rows=rows,
    notes=[
      f'SIMULATED acceptance of {args.alpha:g} per drafted token. Prompts of '
      f'at least {args.prompt_tokens} tokens, {args.max_new_tokens} new ones. '
      'The planner chooses gamma, at least 1, from these costs. T(w) is the '
      'time of an iteration that scores w positions, and c that of a drafted '
      'token over T(1). "By its parts" is the speedup predicted from these '
      'costs for the same iterations. "Parts" is the time of the drafts and '
      'T(gamma + 1) over that of the whole iteration. "Bytes" is what the '
      "compiled iteration reads and writes, drafts included, by the compiler's "
      "count, over the bytes of the target's weights "
      f'({num_bytes / 2**30:.2f} GiB).',
    ],
  )


def cache_table(args: argparse.Namespace) -> Table:
  """Makes rows for each number of tokens and capacity."""
  decoder = _load(args.cache_model, args, args.cache_dtype)
  prompts = {
    (batch_size, length): _prompt(decoder, batch_size, args, length)
    for batch_size in args.batch_sizes
    for length in args.cache_tokens
  }
  return cache.table(decoder, prompts, args.capacities, args.repeats)


def _outline(pair: str, args: argparse.Namespace, dtype: str = '') -> Decoder:
  """Makes the decoder of a pair, without its weights."""
  target, _, draft = pair.partition('/')
  target, _, weights = target.partition('@')
  model = functools.partial(Model, dtype=dtype or args.dtype)
  gamma = WIDTHS[-1] - 1
  drafter: DrafterChoice = PromptLookup(gamma=gamma)
  if found := re.fullmatch(r'(\d)bits', draft):
    drafter = Quantized(bits=int(found[1]), gamma=gamma)
  elif draft:
    choice = DRAFTERS[usual.drafter(draft)]
    drafter = choice(model=model(checkpoint=draft), gamma=gamma)
  return decoder_lib.outline(
    model(checkpoint=target, weights=weights or None), drafter=drafter
  )


def _lack_of_room(outline: Decoder) -> str:
  """Tells why the weights do not fit in the memory of one device; empty if they
  do, or if its memory is unknown."""
  device = jax.devices()[0]
  room = (device.memory_stats() or {}).get('bytes_limit', math.inf)
  if device.platform == 'cpu':
    room = os.sysconf('SC_PAGE_SIZE') * os.sysconf('SC_PHYS_PAGES')
  own = decoder_lib.own_params(outline.params)
  num_bytes = mesh_lib.tree_bytes((outline.params.target, own))
  if num_bytes < room:
    return ''
  return (
    f'its weights take {num_bytes / 2**30:.0f} GiB, and {device.device_kind} '
    f'has {room / 2**30:.0f}'
  )


def _load(pair: str, args: argparse.Namespace, dtype: str = '') -> Decoder:
  """Loads target and drafter, with simulated acceptance and without EOS."""
  decoder = decoder_lib.load(_outline(pair, args, dtype))
  rule = functools.partial(simulated_acceptance, alpha=args.alpha)
  method = dataclasses.replace(decoder.method, verify_fn=rule, eos_id=(-1,))
  return decoder.with_method(method)


def _row(decoder: Decoder, batch_size: int, args: argparse.Namespace) -> Cells:
  """Measures the costs of the parts and, with the gamma that is best for them,
  both speeds in turns."""
  prompt = _prompt(decoder, batch_size, args)
  key = jax.random.key(0)
  shared: dict[str, Any] = {
    'method': decoder.method,
    'max_len': prompt.decoder_tokens.shape[1] + args.max_new_tokens,
  }
  plain = loops_lib.plain_loop(decoder.params, key, [prompt], **shared)
  made = iteration_costs.cost_programs(
    decoder.params,
    key,
    prompt,
    drafters={1: decoder.at(1).drafter, WIDTHS[-1] - 1: decoder.drafter},
    widths=WIDTHS,
    plain=plain,
    **shared,
  )
  timed = stopwatch.alternate(made.programs, args.repeats)
  figures = made.costs(*timed)
  costs = Costs.among(figures)
  choices = planner.plan(
    args.alpha, costs, batch_size=batch_size, length=args.max_new_tokens
  ).choices
  gamma = max(choices[1:], key=lambda choice: choice.speedup).gamma
  drafted = loops_lib.speculative_loop(
    decoder.params,
    key,
    [prompt],
    **shared | {'method': decoder.at(gamma).method},
  )
  seconds, states = stopwatch.alternate(
    {'plain': plain.decode, 'drafted': drafted.decode}, args.repeats
  )
  [state] = states['drafted']
  num_tokens = batch_size * args.max_new_tokens
  num_iterations = int(state.statistics.num_target_runs.max())
  iteration = float(np.median(seconds['drafted'])) / num_iterations
  parts = costs.drafting_seconds(gamma) + costs.scoring_seconds(gamma)
  plain_iteration = float(np.median(seconds['plain'])) / args.max_new_tokens
  expected = costs.decode_seconds(0, args.max_new_tokens) / (
    costs.decode_seconds(gamma, num_iterations)
  )
  speed = lambda name: num_tokens / float(np.median(seconds[name]))
  num_bytes = drafted.run.cost_analysis().get('bytes accessed')
  weights = mesh_lib.tree_bytes(decoder.params.target)
  return {
    'batch': batch_size,
    'T(1), ms': f'{1e3 * costs.plain_seconds:.3f}',
    **{
      f'T({width})/T(1)': f'{costs.verify_cost_ratio(width - 1):.2f}'
      for width in WIDTHS[1:]
    },
    'gamma': gamma,
    'c': f'{costs.c(gamma):.4f}',
    'plain tokens/s': f'{speed("plain"):.1f}',
    'speculative tokens/s': f'{speed("drafted"):.1f}',
    'speedup': f'{np.median(seconds["plain"] / seconds["drafted"]):.2f}',
    'by its parts': f'{expected:.2f}',
    'parts': f'{parts / iteration:.2f}',
    'plain loop/T(1)': f'{plain_iteration / costs.plain_seconds:.2f}',
    'bytes': '' if num_bytes is None else f'{num_bytes / weights:.2f}',
  }


def _prompt(
  decoder: Decoder,
  batch_size: int,
  args: argparse.Namespace,
  num_tokens: int = 0,
) -> Prompt:
  """Packs rows of one length: the tokens of a text, repeated."""
  ids = decoder.vocabulary.encode(_TEXT, add_special_tokens=False)
  text = _TEXT * -(-(num_tokens or args.prompt_tokens) // len(ids))
  settings = running.DecodeSettings(
    max_new_tokens=args.max_new_tokens, batch_size=batch_size
  )
  [batch] = packing.pack(decoder, [text] * batch_size, settings)
  return batch.prompt


def _parser() -> argparse.ArgumentParser:
  parser = argparse.ArgumentParser(
    prog=f'python -m {MODULE}', description=__doc__.splitlines()[0]
  )
  parser.add_argument(
    '--pairs',
    type=common.listed(),
    default=list(PAIRS),
    help='TARGET, TARGET@int8, TARGET/DRAFT_MODEL or TARGET/4bits, with commas '
    f'between (default: {",".join(PAIRS)})',
  )
  parser.add_argument(
    '--batch_sizes', type=common.numbers, default=[1, 4, 16, 64]
  )
  common.add_tables(parser, ('pairs', 'cache'))
  parser.add_argument('--cache_model', default='smollm2-135m')
  parser.add_argument(
    '--cache_dtype', choices=presets.DTYPES, default='float32'
  )
  parser.add_argument('--cache_tokens', type=common.numbers, default=[100])
  parser.add_argument('--capacities', type=common.numbers, default=[256, 2048])
  parser.add_argument('--alpha', type=float, default=0.75)
  parser.add_argument('--dtype', choices=presets.DTYPES, default='bfloat16')
  parser.add_argument('--output', default='experiments/accelerator/results')
  common.add_counts(parser, prompt_tokens=64, max_new_tokens=128, repeats=5)
  return parser


if __name__ == '__main__':
  sys.exit(main())
