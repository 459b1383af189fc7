"""Trains drafters as the shipped ones in slices of time, as on a lent GPU.

    python -m experiments.pretrained.on_gpu eagle --prompts=prompts.jsonl \
      --out=out/eagle --minutes=9
    python -m experiments.pretrained.on_gpu spec_drafter \
      --tokens tokens/ende_distilled tokens/en_distilled --out=out/spec_drafter

The stages are commands that go on where they were stopped. A call runs what is
left of them for `--minutes`, then interrupts them; the same command goes on,
on another machine too if it has the folder. The exit status is 75 while
something is left, and 0 when OUT/weights has the drafter in bfloat16. OUT/
curve.svg has the learning curve so far. `python -m experiments.pretrained ship`
ships the runs.
"""

import argparse
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from experiments import common
from experiments.pretrained import curve
from specdec_jax.files import replacing
from specdec_jax.launch.numbers import positive_int
from specdec_jax.training import metrics_log

Stages = Mapping[str, Sequence[str]]

# As sysexits.h has it: the same command goes on later.
_EXIT_LATER = 75
# What an interrupted command has to stop in.
_SECONDS_TO_STOP = 60


def main(argv: Sequence[str] | None = None) -> int:
  args = _parser().parse_args(argv)
  status = 0

  def run() -> None:
    nonlocal status
    args.out.mkdir(parents=True, exist_ok=True)
    status = run_slice(args.stages(args), args.out, 60 * args.minutes)
    _draw(args.out)

  return common.finish('on_gpu', run) or status


def run_slice(stages: Stages, folder: Path, seconds: float) -> int:
  """Runs the stages that are left, in their order, for so many seconds.

  Returns 0 if none is left, 75 if the time was up, else the exit status of the
  stage that failed. ValueError if a stage was done by another command.
  """
  end = time.monotonic() + seconds
  for name, argv in stages.items():
    done, command = folder / f'{name}.done', shlex.join(argv)
    if done.exists():
      if (before := done.read_text(encoding='utf-8')) != command:
        raise ValueError(
          f'{folder}: {name} was done by another command, {before}: give '
          'another --out'
        )
      continue
    started = time.monotonic()
    with subprocess.Popen([sys.executable, '-m', 'specdec_jax', *argv]) as run:
      try:
        status = run.wait(max(end - started, 0.0))
      except subprocess.TimeoutExpired:
        _interrupt(run)
        status = _EXIT_LATER
    taken = f'{name}: {time.monotonic() - started:.0f} s'
    if status:
      what = 'the same command goes on' if status == _EXIT_LATER else 'failed'
      print(f'{taken}, {what}', flush=True)
      return status
    replacing.write_text(done, command)
    print(f'{taken}, done', flush=True)
  return 0


def _interrupt(run: subprocess.Popen) -> None:
  run.send_signal(signal.SIGINT)
  try:
    run.wait(_SECONDS_TO_STOP)
  except subprocess.TimeoutExpired:
    run.kill()


def _eagle(args: argparse.Namespace) -> Stages:
  """Writes texts, trains with one unrolled step, and with three from there."""
  texts, out = args.out / 'texts', args.out
  first, second = args.steps
  write = ('data', 'write', f'--model={args.target}', f'--out={texts}')
  train = (
    *('train', '--gin_file=train/smollm2_eagle.gin'),
    *(f'--gin.TARGET="{args.target}"', f'--gin.TEXTS="{texts}"'),
  )
  return {
    'texts': (
      *(*write, f'--prompts={args.prompts}', '--chat', '--dtype=bfloat16'),
      *('--temperature', '0', '.7', '0', '1'),
      *('--layers', *map(str, args.layers)),
      *(f'--batch_size={args.rows}', f'--part_size={4 * args.rows}'),
      f'--max_new_tokens={args.max_new_tokens}',
    ),
    'first': (
      *(*train, f'--gin.MODEL_DIR="{out / "first"}"', '--gin.NUM_STEPS=1'),
      f'--gin.TRAIN_STEPS={first}',
      *_macros(args, args.begin_from),
    ),
    'second': (
      *(*train, f'--gin.MODEL_DIR="{out / "second"}"', '--gin.NUM_STEPS=3'),
      *(f'--gin.TRAIN_STEPS={second}', '--gin.LEARNING_RATE=0.0007'),
      '--gin.WARMUP_STEPS=30',
      *_macros(args, out / 'first' / 'model'),
    ),
    'weights': _weights(out / 'second' / 'model', out, 'huggingface'),
  }


def _spec_drafter(args: argparse.Namespace) -> Stages:
  """Trains a Spec-Drafter on token files that its target has rewritten."""
  run = args.out / 'run'
  gin = 'experiments/xia2023/gin/debian_ende_spec_drafter.gin'
  return {
    'train': (
      *('train', f'--gin_file={gin}', f'--gin.TARGET="{args.target}"'),
      '--gin.DRAFTER="mini_2_1"',
      *(f'--gin.TOKENS={args.tokens!r}', f'--gin.MODEL_DIR="{run}"'),
      *_macros(args, args.begin_from),
    ),
    'weights': _weights(run / 'model', args.out, 'safetensors'),
  }


def _macros(args: argparse.Namespace, begin_from: object) -> list[str]:
  found = [f'--gin.{binding}' for binding in args.gin]
  if begin_from is not None:
    found.append(f'--gin.INITIAL_CHECKPOINT_PATH="{begin_from}"')
  return found


def _weights(model: Path, out: Path, to: str) -> Sequence[str]:
  destination = str(out / 'weights')
  return (
    *('convert', str(model), destination, f'--to={to}'),
    *('--dtype=bfloat16', '--overwrite'),
  )


def _draw(folder: Path) -> None:
  """Draws the learning curve of the runs that were begun."""
  log = lambda name: metrics_log.read_log(folder / name / metrics_log.NAME)
  logs = [(name, log(name)) for name in ('run', 'first', 'second')]
  if any(lines for _, lines in logs):
    curve.draw(logs, folder / curve.NAME)


def _parser() -> argparse.ArgumentParser:
  parser = argparse.ArgumentParser(
    prog='python -m experiments.pretrained.on_gpu',
    description=__doc__,
    formatter_class=argparse.RawDescriptionHelpFormatter,
  )
  commands = parser.add_subparsers(required=True, metavar='DRAFTER')
  eagle = commands.add_parser('eagle', help='for SmolLM2')
  eagle.set_defaults(stages=_eagle)
  add = eagle.add_argument
  add('--prompts', required=True, help='what experiments.eagle.prompts wrote')
  add('--target', default='smollm2-135m', help='the model that writes')
  layers = [2, 15, 27, 30]
  add('--layers', type=positive_int, nargs='+', default=layers, help='kept')
  add(
    '--steps', type=positive_int, nargs=2, default=[4300, 900], help='of runs'
  )
  add('--rows', type=positive_int, default=256, help='texts written at once')
  add('--max_new_tokens', type=positive_int, default=256, help='per text')
  spec = commands.add_parser('spec_drafter', help='for ende-mini')
  spec.set_defaults(stages=_spec_drafter)
  spec.add_argument('--tokens', nargs='+', required=True, help='token files')
  spec.add_argument('--target', default='ende-mini', help='that rewrote them')
  for command in (eagle, spec):
    add = command.add_argument
    add('--out', type=Path, required=True, help='folder of all that is made')
    add('--minutes', type=float, default=9.0, help='of a call')
    add('--begin_from', help='a drafter to train further')
    add('--gin', nargs='+', default=[], help='macros: BATCH_SIZE=16 ...')
  return parser


if __name__ == '__main__':
  sys.exit(main())
