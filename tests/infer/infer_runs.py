"""Runs of `infer` on the checkpoint that T5X wrote."""

import json
import pathlib

import numpy as np

from specdec_jax.text import vocabulary_files
from tests.checkpoints.tiny_t5 import T5X

ROOT = pathlib.Path(__file__).parents[2]
RUN = ROOT / 'gin_configs' / 'runs' / 'infer.gin'
LENGTHS = "{'inputs': 12, 'targets': 16}"
BATCH_SIZE = 8
# Examples of the fixture `task`.
NUM_EXAMPLES = 44


def write_task(path: pathlib.Path, num_examples: int, seed: int = 0) -> None:
  """Inputs of 2 to 20 words, among them some that are too long."""
  vocabulary = vocabulary_files.read(T5X / 'tiny_sp.model')
  words = [vocabulary.id_to_text(i).strip() for i in range(4, 57)]
  rng = np.random.default_rng(seed)
  with path.open('w') as file:
    for _ in range(num_examples):
      text = ' '.join(rng.choice(words, rng.choice([2, 3, 4, 6, 9, 20]))) + '.'
      file.write(json.dumps({'inputs': text, 'targets': text}) + '\n')


def argv(model, task, out, *more, **bindings) -> list[str]:
  """`specdec infer`, on one device unless `bindings` say otherwise.

  Args:
    model: folder of the checkpoint.
    task: path of the examples.
    out: the output folder.
    *more: further flags.
    **bindings: gin bindings, a double underscore for a dot.
  """
  macros = {
    'MIXTURE_OR_TASK_NAME': repr(str(task)),
    'TASK_FEATURE_LENGTHS': LENGTHS,
    'CHECKPOINT_PATH': repr(str(model)),
    'INFER_OUTPUT_DIR': repr(str(out)),
    'DTYPE': "'float32'",
    'Decoding.batch_size': BATCH_SIZE,
    'infer.checkpoint_period': 1,
    'device_mesh.num_devices': 1,
  }
  macros |= {k.replace('__', '.'): v for k, v in bindings.items()}
  return [
    'infer',
    '--model=as_stored',
    f'--gin_file={RUN}',
    *(str(flag) for flag in more),
    *(f'--gin.{name}={value}' for name, value in macros.items()),
  ]


def gin_file(name: str) -> str:
  """The flag for a file of gin_configs."""
  return f'--gin_file={ROOT / "gin_configs" / name}'


def result(out, task='task', shard='00000-of-00001') -> pathlib.Path:
  return pathlib.Path(out) / f'{task}-predict.jsonl-{shard}'


def records(path: pathlib.Path) -> list[dict]:
  return [json.loads(line) for line in path.read_text().splitlines()]


def predictions(path: pathlib.Path) -> list[str]:
  return [record['prediction'] for record in records(path)]


def dry_run_rows(text: str) -> dict[str, list[int]]:
  """Values, bytes and bytes per chip of each row of a dry run's table."""
  return {
    line.split('│')[1].strip(): [
      int(cell.replace(',', '')) for cell in line.split('│')[2:5]
    ]
    for line in text.splitlines()
    if line.startswith('│')
  }
