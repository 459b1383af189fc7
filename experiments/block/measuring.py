"""Counts what is accepted of a drafter, and times it by `specdec bench`."""

import argparse
import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from experiments import common
from specdec_jax.cli import from_flags
from specdec_jax.decoding import rates
from specdec_jax.decoding.state import DecodeState
from specdec_jax.files import text_lines
from specdec_jax.measure import bench_command, loops, timing
from specdec_jax.theory import estimates

Figures = dict[str, Any]
_SUITE = Path('experiments/suite/prompts')
_NUM_TEXTS = 256
_BATCH_SIZE = 16


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
    command += [*_options(drafter), *options, '--json', str(out)]
    subprocess.run(command, check=True)
  figures: Figures = json.loads(out.read_text('utf-8'))
  return figures


def count(drafter: Drafter, out: Path, prompts: Path, gamma: int) -> Figures:
  """Counts what greedy decoding in float32 accepts, and the texts that differ
  from plain decoding; writes the figures, or reads them."""
  if out.is_file():
    figures: Figures = json.loads(out.read_text('utf-8'))
    return figures
  parser = argparse.ArgumentParser()
  bench_command.add_arguments(parser)
  args = parser.parse_args(
    [
      *_options(drafter),
      *('--dtype', 'float32', '--gamma', str(gamma)),
      *('--prompts', str(prompts), '--max_new_tokens', '64'),
      *('--batch_size', str(_BATCH_SIZE)),
    ]
  )
  choices = from_flags.choices(args, may_be_auto=False)
  decoder, batches, settings, _ = from_flags.prepared(args, choices)
  placed = timing.place(decoder, batches, settings)
  plain = placed.plain_loops(())['float32'].decode()
  states = loops.speculative_loop(
    *placed.args, method=decoder.method, max_len=placed.max_len
  ).decode()
  statistics = rates.count([state.statistics for state in states]).statistics
  tested = statistics.num_tested.sum(0)
  by_position = statistics.num_accepted.sum(0) / np.maximum(tested, 1)
  figures = {
    'alpha_by_position': by_position.tolist(),
    'block_efficiency': rates.rates(statistics).block_efficiency,
    'interval': estimates.ratio(
      statistics.num_tokens, statistics.num_target_runs
    )[1],
    'different_texts': sum(map(_num_different, plain, states)),
  }
  out.parent.mkdir(parents=True, exist_ok=True)
  out.write_text(json.dumps(figures), 'utf-8')
  return figures


def _num_different(plain: DecodeState, drafted: DecodeState) -> int:
  """Counts the rows of a batch whose texts differ."""
  first, second = jax.device_get((plain.context, drafted.context))
  rows = zip(
    *(first.tokens, first.lengths, second.tokens, second.lengths), strict=True
  )
  return sum(
    not np.array_equal(tokens[:length], others[:other_length])
    for tokens, length, others, other_length in rows
  )


def _options(drafter: Drafter) -> list[str]:
  return [
    *('--model', drafter.target, *drafter.options),
    *('--drafter', drafter.drafter, '--draft_model', drafter.weights),
  ]


def time(
  drafter: Drafter, out: Path, timed_texts: tuple[str, int, int], gamma: int
) -> Figures:
  """Times decoding at batch 1; for `timed_texts` see `recipes.Target`."""
  file, num_prompts, num_tokens = timed_texts
  lines = Path(file).read_text('utf-8').splitlines(keepends=True)
  prompts = out.with_name('speed_prompts.jsonl')
  prompts.parent.mkdir(parents=True, exist_ok=True)
  prompts.write_text(''.join(common.spread(lines, num_prompts)), 'utf-8')
  return bench(
    *(drafter, out, '--gamma', str(gamma), '--prompts', str(prompts)),
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
  return np.array(figures['alpha_by_position'])
