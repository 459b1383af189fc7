"""Predicts speeds on TPUs for models and drafters whose acceptance is measured.

    python -m experiments.predicted

`specdec calibrate` measures acceptance on this machine, the TPU compiler
compiles the same models' iterations for a chip (it needs libtpu but no TPU),
and the planner chooses gamma. README.md has the table.
"""

import argparse
import functools
import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from experiments import common, report
from experiments.report import Cells, Table
from specdec_jax.assembly import decoder as decoder_lib
from specdec_jax.assembly.drafters import DRAFTERS
from specdec_jax.assembly.drafters.choice import has_model
from specdec_jax.assembly.models import Model
from specdec_jax.assembly.option_fields import by_name
from specdec_jax.planning import aot, parts, planner
from specdec_jax.planning.workloads import Workload
from specdec_jax.theory.costs import Costs

MODULE = 'experiments.predicted'
_PROMPTS = 'experiments/prompts'


class Pair(NamedTuple):
  """Who decodes which text, as `specdec calibrate` takes them."""

  model: str
  drafter: str
  draft_model: str
  text: str
  options: str


_CHAT = f'--chat --prompts {_PROMPTS}/chat.jsonl'
_SHORT = f'--prompts {_PROMPTS}/short.jsonl'
_SMOLLM2 = 'smollm2-135m'
PAIRS = {
  'translation': Pair(
    'ende-mini', 'model', 'ende-nano', 'English to German', _SHORT
  ),
  'language_model': Pair(
    'lm-mini', 'model', 'lm-nano', 'package descriptions', _SHORT
  ),
  'copy': Pair(
    *(_SMOLLM2, 'prompt_lookup', '', 'prompts that ask for a copy'),
    f'--chat --prompts {_PROMPTS}/copy.jsonl',
  ),
  'chat': Pair(_SMOLLM2, 'prompt_lookup', '', 'chat', _CHAT),
  'eagle': Pair(_SMOLLM2, 'eagle', 'smollm2-135m-eagle', 'chat', _CHAT),
}


def main(argv: Sequence[str] | None = None) -> int:
  argv = sys.argv[1:] if argv is None else argv
  args = _parser().parse_args(argv)
  return common.finish('predicted', lambda: _run(args, argv))


def _run(args: argparse.Namespace, argv: Sequence[str]) -> None:
  made = functools.partial(table, args)
  title = 'Speeds on TPUs, predicted'
  report.measure((MODULE, argv), args.output, 'predicted', title, made)


def table(args: argparse.Namespace) -> Table:
  """A row for each pair, with two columns for each chip."""
  rows = [row(PAIRS[name], args) for name in args.tables]
  return Table(
    rows=rows,
    notes=[
      'PREDICTIONS: no TPU has run any of it. Acceptance was measured on this '
      f'machine, greedy, {args.max_new_tokens} new tokens per text, in '
      'float32; alpha is its mean, and the plans take the rates of each '
      'position. Iterations are compiled for each chip in bfloat16, at batch 1 '
      f'with {args.input_length} tokens of input, and priced by a roofline; '
      f'gamma is at most {args.gamma}. c is a drafted token over T(1).',
    ],
  )


def row(pair: Pair, args: argparse.Namespace) -> Cells:
  """The acceptance that is measured, and what it gives on each chip."""
  measured = calibrated(pair, args)
  names = pair.draft_model or pair.drafter.replace('_', ' ')
  cells: Cells = {
    'target and drafter': f'{pair.model}, {names}',
    'text': pair.text,
    'alpha': f'{measured["alpha"]:.2f}',
  }
  for topology in args.topologies:
    sizes = args.gamma, args.input_length, args.max_new_tokens
    costs = compiled(*pair[:3], topology, *sizes)
    best = planner.plan(measured['profile'], costs, max_gamma=args.gamma).best
    chip = topology.partition(':')[0]
    cells[f'{chip}: T(1), ms'] = f'{1e3 * costs.plain_seconds:.3f}'
    cells[f'{chip}: c'] = f'{costs.c(args.gamma):.2f}'
    speed = f'gamma {best.gamma}, {best.speedup:.2f} times'
    cells[f'{chip}: predicted'] = speed if best.gamma else 'plain is faster'
  return cells


def calibrated(pair: Pair, args: argparse.Namespace) -> dict[str, Any]:
  """What `specdec calibrate` writes of a pair."""
  options = [f'--model={pair.model}', f'--drafter={pair.drafter}']
  if pair.draft_model:
    options.append(f'--draft_model={pair.draft_model}')
  options += [*pair.options.split(), f'--gamma={args.gamma}', '--repeats=1']
  options.append(f'--max_new_tokens={args.max_new_tokens}')
  with tempfile.TemporaryDirectory() as folder:
    path = Path(folder, 'costs.json')
    command = [sys.executable, '-m', 'specdec_jax', 'calibrate', *options]
    subprocess.run([*command, f'--json={path}'], check=True)
    figures: dict[str, Any] = json.loads(path.read_text(encoding='utf-8'))
  return figures


@functools.cache
def compiled(
  target: str,
  drafter: str,
  draft_model: str,
  topology: str,
  gamma: int,
  input_length: int,
  output_length: int,
) -> Costs:
  """The costs of a pair's iterations on a chip."""
  make = by_name('drafter', DRAFTERS, drafter)
  model = functools.partial(Model, dtype='bfloat16')
  own = {'model': model(checkpoint=draft_model)} if has_model(make) else {}
  decoder = decoder_lib.outline(
    model(checkpoint=target), drafter=make(**own), is_dry_run=True
  )
  workload = Workload(
    slice=aot.find_slice(topology),
    decoder=decoder,
    batch_size=1,
    input_length=input_length,
    output_length=output_length,
    num_partitions=1,
  )
  return parts.pair_costs(workload, max_gamma=gamma, has_trees=False).costs


def _parser() -> argparse.ArgumentParser:
  parser = argparse.ArgumentParser(
    prog=f'python -m {MODULE}', description=__doc__.splitlines()[0]
  )
  common.add_tables(parser, PAIRS)
  parser.add_argument(
    '--topologies', type=common.listed(), default=['v5e:1x1', 'v6e:1x1']
  )
  parser.add_argument('--output', type=Path, default=Path('out/predicted'))
  common.add_counts(parser, gamma=8, max_new_tokens=48, input_length=128)
  return parser


if __name__ == '__main__':
  sys.exit(main())
