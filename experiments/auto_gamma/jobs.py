"""Compares whole jobs of `specdec infer` without a gamma with plain decoding.

  python -m experiments.auto_gamma.jobs

Each job is a command with `drafters/model.gin` and no gamma, or with
`drafters/none.gin`. They run in pairs; every other pair begins with plain
decoding. The time of a job includes starting, loading, tracing, compiling (with
a warm cache: a first pair of each kind is not counted), choosing and decoding.
No choice is remembered when a job begins. The last column is the median ratio
of the pairs, plain over default, with the least and the greatest: above 1, the
default is faster. The exit status is 1 if a median is below `--least`.
"""

import argparse
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from experiments import common
from experiments.infer_and_generate import read_sentences, write_jsonl
from specdec_jax.measure import stopwatch, trials

DRAFTERS = {
  'plain': ('--gin_file=drafters/none.gin',),
  'default': (
    '--gin_file=drafters/model.gin',
    "--gin.DRAFTER_CHECKPOINT_PATH='ende-nano'",
  ),
}


def seconds_of(folder: Path, name: str, task: Path, *flags: str) -> list[float]:
  """Runs a job: its seconds, of the clock and of the processor."""
  trials.forget()
  out = tempfile.mkdtemp(dir=folder)
  argv = [
    *(
      sys.executable,
      '-m',
      'specdec_jax',
      'infer',
      '--model=as_stored',
      '--gin_file=runs/infer.gin',
    ),
    *DRAFTERS[name],
    "--gin.CHECKPOINT_PATH='ende-mini'",
    f"--gin.MIXTURE_OR_TASK_NAME='{task}'",
    f"--gin.INFER_OUTPUT_DIR='{out}'",
    *flags,
  ]
  started = _now()
  done = subprocess.run(argv, capture_output=True, text=True, check=False)
  ended = _now()
  if done.returncode:
    raise ValueError(done.stderr)
  for line in done.stderr.splitlines():
    if 'gamma auto' in line:
      print(f'  {line}', file=sys.stderr, flush=True)
  return [end - start for start, end in zip(started, ended, strict=True)]


def _now() -> tuple[float, float]:
  used = resource.getrusage(resource.RUSAGE_CHILDREN)
  return time.perf_counter(), used.ru_utime + used.ru_stime


def run(args: argparse.Namespace) -> int:
  """Measures all jobs; the exit status."""
  # What users remember stays as it is, and compiled programs are kept.
  with tempfile.TemporaryDirectory() as name:
    os.environ['XDG_CACHE_HOME'] = name
    return _measure(args, Path(name))


def _measure(args: argparse.Namespace, folder: Path) -> int:
  print(f'{stopwatch.device_name()}; {args.new_tokens} new tokens at most\n')
  print('| sentences | way | dtype | plain, s | default, s | of plain |')
  print('|---|---|---|---|---|---|', flush=True)
  ways = [(f'batch {each}', 'batch_size', each) for each in args.batch_sizes]
  ways += [('4 beams', 'num_decodes', 4)] if args.beam_sentences else []
  worst = float('inf')
  for dtype in args.dtypes:
    for way, field, value in ways:
      beams = field == 'num_decodes'
      for count in args.beam_sentences if beams else args.sentences:
        task = folder / f'{count}.jsonl'
        write_jsonl(task, 'inputs', read_sentences(count))
        lengths = {'inputs': 64, 'targets': args.new_tokens}
        flags = (
          f"--gin.DTYPE='{dtype}'",
          f'--gin.Decoding.{field}={value}',
          f'--gin.TASK_FEATURE_LENGTHS={lengths}',
        )
        # Of a job of seconds a few pairs more.
        num_pairs = args.pairs if count >= 200 else 2 * args.pairs
        pairs = []
        for i in range(-1, num_pairs):
          names = list(DRAFTERS)[:: -1 if i % 2 else 1]
          took = {
            name: seconds_of(folder, name, task, *flags) for name in names
          }
          pairs += [took] if i >= 0 else []  # The first fills the cache.
        ratios, processor = (
          [each['plain'][j] / each['default'][j] for each in pairs]
          for j in (0, 1)
        )
        clock = statistics.median(ratios)
        plain, default = (
          statistics.median(each[name][0] for each in pairs)
          for name in DRAFTERS
        )
        worst = min(worst, clock)
        print(
          f'| {count} | {way} | {dtype} | {plain:.2f} | {default:.2f} | '
          f'{clock:.3f} ({min(ratios):.3f} to {max(ratios):.3f}; '
          f'{statistics.median(processor):.3f} by processor time) |',
          flush=True,
        )
  print(f'\nThe least is {worst:.3f}.')
  return int(worst < args.least)


def main(argv: Sequence[str] | None = None) -> int:
  parser = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawTextHelpFormatter
  )
  numbers = common.numbers
  add = parser.add_argument
  add('--sentences', type=numbers, default=[50, 2000])
  add('--beam_sentences', type=numbers, default=[50, 200])
  add('--batch_sizes', type=numbers, default=[1, 8, 32])
  add('--dtypes', nargs='+', default=['float32', 'bfloat16'])
  add('--new_tokens', type=int, default=24)
  add('--pairs', type=int, default=1, help='twice as many of 50')
  add('--least', type=float, default=0.97)
  return run(parser.parse_args(argv))


if __name__ == '__main__':
  sys.exit(main())
