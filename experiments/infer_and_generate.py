"""Times whole jobs of `specdec infer` and `specdec generate`, plain decoding.

    python -m experiments.infer_and_generate --pairs 10

Both commands decode the same sentences of the suite's prompts with `ende-mini`,
on one device. They run in pairs; every other pair begins with `generate`. A
first pair, which fills the cache of compiled programs, is not counted. Speeds
are without start-up: `infer` prints its own, without loading and compiling, and
`generate` writes a line for each sentence, of which those after the first batch
count. The last columns are the medians of the pairs' ratios, `infer` over
`generate`, with the least and the greatest, and how many texts are the same.
"""

import argparse
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import jax

from experiments import common
from specdec_jax.launch import platforms
from specdec_jax.models import presets

MODEL = 'ende-mini'
PROMPTS = Path(__file__).parent / 'suite' / 'prompts'
MAX_INPUT_TOKENS = 64
COMMAND = (sys.executable, '-m', 'specdec_jax')
# Sentences of other lengths are left out.
MIN_CHARACTERS, MAX_CHARACTERS = 25, 160


class Job(NamedTuple):
  """Sentences in files of both commands, and how they are decoded."""

  folder: Path
  sentences: Sequence[str]
  dtype: str
  batch_size: int
  max_new_tokens: int


class Decoded(NamedTuple):
  """The texts of a job, and its tokens per second without start-up."""

  texts: list[str]
  speed: float


def read_sentences(count: int) -> list[str]:
  """Returns sentences of the suite's prompts, repeated if they are too few."""
  files = sorted(PROMPTS.glob('*.jsonl'))
  records = [record for file in files for record in read_jsonl(file)]
  text = ' '.join(record['prompt'] for record in records)
  sentences = [
    sentence
    for sentence in dict.fromkeys(re.split(r'(?<=[.?!])\s+', text))
    if MIN_CHARACTERS <= len(sentence) <= MAX_CHARACTERS
  ]
  return [sentences[i % len(sentences)] for i in range(count)]


def read_jsonl(path: Path) -> list[dict]:
  """Reads one object per line."""
  with path.open(encoding='utf-8') as file:
    return [json.loads(line) for line in file]


def write_jsonl(path: Path, key: str, texts: Sequence[str]) -> None:
  """Writes one object per line, with one key."""
  lines = [json.dumps({key: text}) for text in texts]
  path.write_text('\n'.join(lines) + '\n', encoding='utf-8')


def environment(job: Job) -> dict[str, str]:
  """Returns the environment of a command: compiled programs are kept from pair
  to pair, and no gammas that users measured are read."""
  return os.environ | {'XDG_CACHE_HOME': str(job.folder)}


def run_infer(job: Job) -> Decoded:
  """Runs `specdec infer`; raises ValueError if it fails."""
  task = job.folder / 'task.jsonl'
  write_jsonl(task, 'inputs', job.sentences)
  out = Path(tempfile.mkdtemp(dir=job.folder))
  lengths = {'inputs': MAX_INPUT_TOKENS, 'targets': job.max_new_tokens}
  bindings = {
    'CHECKPOINT_PATH': repr(MODEL),
    'MIXTURE_OR_TASK_NAME': repr(str(task)),
    'INFER_OUTPUT_DIR': repr(str(out)),
    'TASK_FEATURE_LENGTHS': lengths,
    'DTYPE': repr(job.dtype),
    'Decoding.batch_size': job.batch_size,
    'device_mesh.num_devices': 1,
  }
  argv = [
    *COMMAND,
    'infer',
    '--model=as_stored',
    '--gin_file=runs/infer.gin',
    '--gin_file=drafters/none.gin',
    *(f'--gin.{name}={value}' for name, value in bindings.items()),
  ]
  process = subprocess.run(
    argv, env=environment(job), capture_output=True, text=True, check=False
  )
  match = re.search(r': ([\d.]+) tokens/s', process.stderr)
  if process.returncode or match is None:
    raise ValueError(process.stderr)
  (path,) = out.glob('task-predict.jsonl-*-of-*1')
  texts = [record['prediction'] for record in read_jsonl(path)]
  return Decoded(texts, float(match[1]))


def run_generate(job: Job) -> Decoded:
  """Runs `specdec generate`; raises ValueError if it fails."""
  prompts = job.folder / 'prompts.jsonl'
  write_jsonl(prompts, 'prompt', job.sentences)
  argv = [
    *COMMAND,
    'generate',
    f'--model={MODEL}',
    '--drafter=none',
    f'--dtype={job.dtype}',
    f'--prompts={prompts}',
    f'--batch_size={job.batch_size}',
    f'--max_new_tokens={job.max_new_tokens}',
    '--json=-',
  ]
  records, times = [], []
  process = subprocess.Popen(
    argv, env=environment(job), stdout=subprocess.PIPE, text=True
  )
  with process:
    for line in process.stdout or ():
      times.append(time.perf_counter())
      records.append(json.loads(line))
  if process.returncode:
    raise ValueError(f'generate ended with status {process.returncode}')
  # A batch's lines are written together, once all of its rows are decoded.
  timed = records[job.batch_size :]
  num_tokens = sum(len(record['tokens']) for record in timed)
  seconds = times[-1] - times[job.batch_size - 1]
  texts = [record['text'] for record in records]
  return Decoded(texts, num_tokens / seconds)


COMMANDS = {'infer': run_infer, 'generate': run_generate}


def run_pair(job: Job, i: int) -> dict[str, Decoded]:
  """Runs both commands, the order depending on whether `i` is even."""
  names = list(COMMANDS)[:: 1 if i % 2 else -1]
  return {name: COMMANDS[name](job) for name in names}


def shown(values: Sequence[float], digits: int) -> str:
  """Returns the median, with the least and the greatest."""
  median = statistics.median(values)
  least, greatest = min(values), max(values)
  return f'{median:.{digits}f} ({least:.{digits}f} to {greatest:.{digits}f})'


def measure(job: Job, num_pairs: int) -> str:
  """Runs the pairs of a job; returns its row of the table."""
  run_pair(job, 0)
  pairs = [run_pair(job, i) for i in range(num_pairs)]
  infer, generate = (
    [pair[name].speed for pair in pairs] for name in ('infer', 'generate')
  )
  ratios = [x / y for x, y in zip(infer, generate, strict=True)]
  last = pairs[-1]
  texts = zip(last['infer'].texts, last['generate'].texts, strict=True)
  num_same = sum(x == y for x, y in texts)
  cells = (
    job.dtype,
    str(job.batch_size),
    shown(infer, 0),
    shown(generate, 0),
    shown(ratios, 2),
    f'{num_same} of {len(job.sentences)}',
  )
  return f'| {" | ".join(cells)} |'


def run(args: argparse.Namespace) -> None:
  """Measures all jobs, and prints a table."""
  if args.sentences <= max(args.batch_sizes):
    raise ValueError('give more sentences than a batch has rows')
  sentences = read_sentences(args.sentences)
  print(
    f'{MODEL}, {args.sentences} sentences, at most {args.max_new_tokens} new '
    f'tokens, {args.pairs} pairs; {platforms.device_name()}, '
    f'jax {jax.__version__}\n'
  )
  print('| dtype | batch | infer, tokens/s | generate | ratio | same texts |')
  print('|---|---|---|---|---|---|', flush=True)
  with tempfile.TemporaryDirectory() as folder:
    for dtype in args.dtypes:
      for batch_size in args.batch_sizes:
        job = Job(
          folder=Path(folder),
          sentences=sentences,
          dtype=dtype,
          batch_size=batch_size,
          max_new_tokens=args.max_new_tokens,
        )
        print(measure(job, args.pairs), flush=True)


def main(argv: Sequence[str] | None = None) -> int:
  parser = argparse.ArgumentParser(
    prog='python -m experiments.infer_and_generate',
    description=__doc__,
    formatter_class=argparse.RawDescriptionHelpFormatter,
  )
  common.add_counts(parser, pairs=10, sentences=200, max_new_tokens=64)
  add = parser.add_argument
  add('--batch_sizes', type=common.numbers, default=[1, 8, 32])
  dtypes = common.listed(common.dtype)
  add('--dtypes', type=dtypes, default=list(presets.DTYPES))
  args = parser.parse_args(argv)
  return common.finish('infer_and_generate', lambda: run(args))


if __name__ == '__main__':
  sys.exit(main())
