"""Measures what README.md and the first lines of experiments/RESULTS.md quote.

    python -m experiments.quoted

Each speed is one `specdec bench` in a process of its own. All together take
about 20 minutes on two idle cores. The results are written to
experiments/quoted/results, and from there to README.md and
experiments/RESULTS.md.
"""

import argparse
import json
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from experiments import common, report, results
from experiments.report import Cells, Table
from experiments.summary import QUOTED

MODULE = 'experiments.quoted'
FOLDER = results.ROOT / Path(QUOTED).parent
_PROMPTS = 'experiments/prompts'
_SMOLLM2 = '--model smollm2-135m --chat'
_LOOKUP = '--drafter prompt_lookup --gamma 8 --max_new_tokens 48'
_EAGLE = '--gamma 3'  # What ships for SmolLM2: with --lookup.
_ENDE = '--model ende-mini --draft_model ende-nano --gamma 4'
_LM = '--model lm-mini --draft_model lm-nano --gamma 1'
_SHORT = f'--max_new_tokens 48 --repeats 15 --prompts {_PROMPTS}/short.jsonl'


class Quote(NamedTuple):
  """A quoted speed: its models, the text, and the options of `bench`."""

  models: str
  text: str
  options: str


QUOTES = {
  'copy': Quote(
    'SmolLM2-135M, prompt lookup, gamma 8',
    'prompts that ask for a copy',
    f'{_SMOLLM2} {_LOOKUP} --repeats 3 --prompts {_PROMPTS}/copy.jsonl',
  ),
  'chat': Quote(
    'SmolLM2-135M, prompt lookup, gamma 8',
    'chat',
    f'{_SMOLLM2} {_LOOKUP} --repeats 3 --prompts {_PROMPTS}/chat.jsonl',
  ),
  'eagle': Quote(
    'SmolLM2-135M, its EAGLE-3 drafter with lookup, gamma 3',
    'chat',
    f'{_SMOLLM2} {_EAGLE} --max_new_tokens 96 --repeats 3 '
    f'--prompts {_PROMPTS}/chat.jsonl',
  ),
  'eagle_bfloat16': Quote(
    'SmolLM2-135M, its EAGLE-3 drafter with lookup, gamma 3',
    'chat',
    f'{_SMOLLM2} {_EAGLE} --dtype bfloat16 --max_new_tokens 96 --repeats 3 '
    f'--prompts {_PROMPTS}/chat.jsonl',
  ),
  'translation': Quote(
    '`ende-mini`, `ende-nano`, gamma 4',
    'English to German',
    f'{_ENDE} {_SHORT}',
  ),
  'translation_bfloat16': Quote(
    '`ende-mini`, `ende-nano`, gamma 4',
    'English to German',
    f'{_ENDE} --dtype bfloat16 {_SHORT}',
  ),
  'language_model': Quote(
    '`lm-mini`, `lm-nano`, gamma 1',
    'package descriptions',
    f'{_LM} {_SHORT}',
  ),
}


def main(argv: Sequence[str] | None = None) -> int:
  argv = sys.argv[1:] if argv is None else argv
  args = _parser().parse_args(argv)
  return common.finish('quoted', lambda: _run(args, argv))


def _run(args: argparse.Namespace, argv: Sequence[str]) -> None:
  if args.tables != list(QUOTES) and args.output == FOLDER:
    raise ValueError(
      'give --output another folder when only some speeds are measured'
    )
  report.measure(
    (MODULE, argv),
    args.output,
    Path(QUOTED).stem,
    'Speeds',
    lambda: _table(args),
  )
  if args.output == FOLDER:
    results.main([])


def _table(args: argparse.Namespace) -> Table:
  rows, notes = [], []
  for name in args.tables:
    quote = QUOTES[name]
    options = shlex.split(quote.options) + shlex.split(args.more)
    with tempfile.TemporaryDirectory() as folder:
      path = Path(folder, 'bench.json')
      bench = [sys.executable, '-m', 'specdec_jax', 'bench', *options]
      subprocess.run([*bench, '--json', path], check=True)
      figures = json.loads(path.read_text(encoding='utf-8'))
    rows.append(_row(quote, options, figures))
    if figures['doubts']:
      notes.append(f'In doubt, {name}: {"; ".join(figures["doubts"])}.')
  return Table(rows=rows, notes=notes)


def _row(
  quote: Quote, options: Sequence[str], figures: dict[str, Any]
) -> Cells:
  least, greatest = figures['speedup_range']
  return {
    'target and drafter': quote.models,
    'text': quote.text,
    'dtype': figures['dtype'],
    'speed': figures['speedup'],
    'turns': f'{least:.2f} to {greatest:.2f}',
    'predicted': figures['predicted_speedup'],
    'tokens per target run': figures['block_efficiency'],
    'c': figures['c'],
    'T(gamma+1) / T(1)': figures['verify_cost_ratio'],
    'plain tokens/s': figures['autoregressive_tokens_per_second'],
    'tokens/s': figures['speculative_tokens_per_second'],
    'plain': figures['baseline'].partition(', ')[2],
    'identical': 'yes' if figures['identical'] else 'no',
    'command': f'specdec bench {shlex.join(options)}',
  }


def _parser() -> argparse.ArgumentParser:
  parser = argparse.ArgumentParser(
    prog=f'python -m {MODULE}', description=__doc__.splitlines()[0]
  )
  common.add_tables(parser, QUOTES)
  parser.add_argument('--output', type=Path, default=FOLDER)
  parser.add_argument(
    '--more', default='', help='options for every bench, such as "--repeats 1"'
  )
  return parser


if __name__ == '__main__':
  sys.exit(main())
