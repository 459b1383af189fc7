"""Compares other systems with this one on the same prompts and weights.

    pip install -e '.[peers]'
    python -m experiments.peers

Every system runs in a process of its own. They take turns prompt by prompt, so
that changes in the machine's speed affect all alike. See README.md.
"""

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from experiments import common, report
from experiments.peers import systems, weights, workers
from experiments.peers.systems import Task
from experiments.peers.workers import Worker
from experiments.report import Cells, Table

MODULE = 'experiments.peers'
PROMPTS = Path(__file__).resolve().parent.parent / 'prompts'
# By task: the target, its drafter, a file of prompts, and a chat template.
TASKS = {
  'copy': ('smollm2-135m', None, 'copy.jsonl', True),
  'chat': ('smollm2-135m', None, 'chat.jsonl', True),
  'translation': (
    *('ende-mini', 'ende-nano'),
    *('package_descriptions.jsonl', False),
  ),
}
OURS, REFERENCE = 'specdec_jax', 'transformers, float32'
OTHERS = ('transformers', 'llama.cpp')


def main(argv: Sequence[str] | None = None) -> int:
  argv = sys.argv[1:] if argv is None else argv
  args = _parser().parse_args(argv)
  return common.finish('peers', lambda: _run(args, argv))


def _run(args: argparse.Namespace, argv: Sequence[str]) -> None:
  for name in args.tables:
    report.measure(
      (MODULE, argv),
      Path(args.output),
      name,
      f'{TASKS[name][0]}: {name}',
      lambda name=name: table(_task(name, args), args.systems, args.repeats),
    )


def _task(name: str, args: argparse.Namespace) -> Task:
  model, draft_model, file, is_chat = TASKS[name]
  lines = (PROMPTS / file).read_text(encoding='utf-8').splitlines()
  return Task(
    model=model,
    draft_model=draft_model,
    folder=Path(args.weights) / model,
    texts=[json.loads(line)['prompt'] for line in lines[: args.num_prompts]],
    is_chat=is_chat,
    num_new=args.max_new_tokens,
    gamma=args.gamma,
  )


def table(task: Task, chosen: Sequence[str], repeats: int) -> Table:
  """Decodes a task with all systems, and compares speeds and tokens."""
  weights.write(task)
  running = _start(task, chosen)
  try:
    return _table(task, running, repeats)
  finally:
    for worker in running:
      worker.close()


def _start(task: Task, chosen: Sequence[str]) -> list[Worker]:
  """A process for each system and each dtype that it has."""
  dtypes = ('float32', 'bfloat16')
  # Ours encodes the prompts.
  running = [
    workers.start(f'{OURS}, {dtype}', systems.ours, task, dtype)
    for dtype in dtypes
  ]
  prompts = running[0].ids, running[0].eos_ids
  if 'transformers' in chosen:
    running += [
      workers.start(
        f'transformers, {dtype}', systems.transformers, task, dtype, *prompts
      )
      for dtype in dtypes
    ]
  if 'llama.cpp' in chosen and weights.has_gguf(task):
    running += [
      workers.start(
        f'llama.cpp, {shown}', systems.llama_cpp, task, file, *prompts
      )
      for shown, file in (
        ('float32', weights.FLOAT32),
        ('4 bits (Q4_1)', weights.QUANTISED),
      )
    ]
  return running


def _table(task: Task, running: Sequence[Worker], repeats: int) -> Table:
  ways = [(worker, way) for worker in running for way in worker.ways]
  num_prompts = len(task.texts)
  seconds = np.zeros((len(ways), num_prompts, repeats))
  tokens: dict[tuple[str, str], list[list[int]]] = {}
  for worker, way in ways:  # Whatever a first call costs.
    worker.decode(way, 0)
  for repeat in range(repeats):
    for prompt in range(num_prompts):
      for i, (worker, way) in enumerate(ways):
        found, seconds[i, prompt, repeat] = worker.decode(way, prompt)
        if repeat == 0:
          tokens.setdefault((worker.name, way), []).append(found)
  keys = [(worker.name, way) for worker, way in ways]
  rates = dict(zip(keys, map(rate, seconds, tokens.values()), strict=True))
  versions = '; '.join(dict.fromkeys(worker.version for worker in running))
  lengths = [len(row) for row in running[0].ids]
  return Table(
    rows=compare(rates, tokens),
    notes=[
      f'{num_prompts} prompts of {min(lengths)} to {max(lengths)} tokens, at '
      f'most {task.num_new} new ones, greedy, batch 1, gamma {task.gamma}; '
      f'{repeats} turns, prompt by prompt. tokens/s are new tokens over '
      'seconds, the prefill included, of each prompt the median turn. "Our '
      'plain" is the faster dtype of plain decoding here; "same tokens" are '
      f'prompts with the tokens of {REFERENCE}, plain.',
      f'Versions: {versions}.',
    ],
  )


def rate(seconds: np.ndarray, tokens: Sequence[Sequence[int]]) -> float:
  """Tokens per second over all prompts, of each prompt the median turn.

  Args:
    seconds: `[prompts, repeats]`.
    tokens: of each prompt.
  """
  return sum(map(len, tokens)) / float(np.median(seconds, axis=1).sum())


def compare(
  rates: Mapping[tuple[str, str], float],
  tokens: Mapping[tuple[str, str], Sequence[Sequence[int]]],
) -> list[Cells]:
  """A row for each system and drafter.

  Args:
    rates: tokens per second, by system and drafter.
    tokens: of each prompt, by the same.
  """
  ours = max(
    found
    for (name, way), found in rates.items()
    if name.startswith(OURS) and way == 'none'
  )
  reference = tokens.get((REFERENCE, 'none'))
  return [
    {
      'system': name,
      'drafter': way,
      'tokens/s': f'{found:.1f}',
      'over its own plain': f'{found / rates[name, "none"]:.2f}',
      'over our plain': f'{found / ours:.2f}',
      'same tokens': _same(tokens[name, way], reference),
    }
    for (name, way), found in rates.items()
  ]


def _same(
  tokens: Sequence[Sequence[int]], reference: Sequence[Sequence[int]] | None
) -> str:
  if reference is None:
    return ''
  num_same = sum(a == b for a, b in zip(tokens, reference, strict=True))
  return f'{num_same} of {len(reference)}'


def _parser() -> argparse.ArgumentParser:
  parser = argparse.ArgumentParser(
    prog=f'python -m {MODULE}', description=__doc__.splitlines()[0]
  )
  common.add_tables(parser, TASKS)
  parser.add_argument(
    '--systems',
    nargs='*',
    choices=OTHERS,
    default=OTHERS,
    help='beside this one (default: all)',
  )
  parser.add_argument('--output', default='experiments/peers/results')
  parser.add_argument('--weights', default='out/peers')
  common.add_counts(
    parser, num_prompts=12, max_new_tokens=64, gamma=8, repeats=3
  )
  return parser


if __name__ == '__main__':
  sys.exit(main())
