"""Decodes with a drafter, by `specdec bench` in a process of its own."""

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from experiments import common
from specdec_jax.files import text_lines

Figures = dict[str, Any]
_SUITE = Path('experiments/suite/prompts')
_NUM_TEXTS = 256
_BATCH_SIZE = 16
# Tokens are those of float32, in which drafts change none.
_COUNTING = ('--dtype', 'float32', '--plain_dtypes', 'float32')


class Drafter(NamedTuple):
  """What drafts for a target.

  Attributes:
    target: its name.
    options: of the target's decoding and of the drafter's.
    drafter: for `--drafter`.
    weights: its folder, or its name in the package.
  """

  target: str
  options: Sequence[str]
  drafter: str
  weights: str


def bench(drafter: Drafter, out: Path, *options: str) -> Figures:
  """Writes the figures of `specdec bench`, or reads them."""
  if not out.is_file():
    out.parent.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, '-m', 'specdec_jax', 'bench']
    command += ['--model', drafter.target, *drafter.options]
    command += ['--drafter', drafter.drafter, '--draft_model', drafter.weights]
    subprocess.run([*command, *options, '--json', str(out)], check=True)
  figures: Figures = json.loads(out.read_text('utf-8'))
  return figures


def count(drafter: Drafter, out: Path, prompts: Path, gamma: int) -> Figures:
  """Counts what greedy decoding accepts of the texts of `test_prompts`."""
  return bench(
    *(drafter, out, *_COUNTING),
    *('--gamma', str(gamma), '--prompts', str(prompts), '--repeats', '1'),
    *('--batch_size', str(_BATCH_SIZE), '--max_new_tokens', '64'),
  )


def time(
  drafter: Drafter, out: Path, prompts: tuple[str, int], gamma: int, isa: str
) -> Figures:
  """Times decoding at batch 1, with the processor's instructions up to `isa`,
  as XLA names them; all by default."""
  file, num_tokens = prompts
  if isa:
    flags = os.environ.get('XLA_FLAGS', '')
    os.environ['XLA_FLAGS'] = f'{flags} --xla_cpu_max_isa={isa}'.strip()
  return bench(
    *(drafter, out, '--gamma', str(gamma), '--prompts', file),
    *('--max_new_tokens', str(num_tokens), '--repeats', '3'),
  )


def test_prompts(corpora: Path, folder: Path) -> Mapping[str, Path]:
  """Writes the texts that are counted on, by target: evenly spread sentences of
  the test split, and the suite's prompts of chat and coding."""
  split = corpora / 'debian_ende' / 'test.jsonl'
  sentences = [record['inputs'] for _, record in text_lines.read_objects(split)]
  suite = [
    record['prompt']
    for name in ('chat', 'coding')
    for _, record in text_lines.read_objects(_SUITE / f'{name}.jsonl')
  ]
  texts = {
    'ende-mini': common.spread(sentences, _NUM_TEXTS),
    'smollm2-135m': suite,
  }
  folder.mkdir(parents=True, exist_ok=True)
  files = {}
  for name, lines in texts.items():
    files[name] = folder / f'{name}.jsonl'
    records = (json.dumps({'prompt': line}) + '\n' for line in lines)
    files[name].write_text(''.join(records), 'utf-8')
  return files


def by_position(figures: Figures) -> np.ndarray:
  """Shares of accepted tokens by position, each once those before are."""
  rates = [rate or 0.0 for rate in figures['alpha_by_position']]
  return np.array(rates)
