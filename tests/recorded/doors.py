"""The doors of the package: each decodes the texts of a case, and returns a
record of each text that JSON can hold."""

import contextlib
import dataclasses
import io
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

import specdec_jax
from specdec_jax import lazy
from specdec_jax.__main__ import main
from tests.recorded import cases, checkpoints
from tests.recorded.cases import NUM_NEW, TEXTS, Case

Record = dict[str, Any]


def write(folder: Path) -> None:
  """Writes the checkpoints, and the texts as each door reads them."""
  checkpoints.write(folder)
  (folder / 'texts.txt').write_text('\n'.join(TEXTS) + '\n')
  lines = [json.dumps({'inputs': text, 'targets': text}) for text in TEXTS]
  (folder / 'task.jsonl').write_text('\n'.join(lines) + '\n')


def run(*argv: object) -> str:
  """Runs `specdec` in this process; returns what it printed. RuntimeError if
  it fails."""
  output, errors = io.StringIO(), io.StringIO()
  with contextlib.redirect_stdout(output), contextlib.redirect_stderr(errors):
    try:
      status = main([str(argument) for argument in argv])
    except SystemExit as stopped:  # By --help.
      status = stopped.code
  if status:
    raise RuntimeError(f'{argv}: status {status}: {errors.getvalue()}')
  return output.getvalue()


def exact(value: Any) -> Any:
  """Returns a value for JSON from which each bit of a float can be read."""
  if isinstance(value, dict):
    return {str(key): exact(item) for key, item in value.items()}
  if isinstance(value, list | tuple):
    return [exact(item) for item in value]
  if isinstance(value, float | np.floating):
    is_finite = math.isfinite(value)
    return float(value).hex() if is_finite else repr(float(value))
  if isinstance(value, np.integer):
    return int(value)
  return value


def options_of(folder: Path, case: Case) -> Record:
  """Returns the options of drafter and rule, with the folder in them."""
  return {
    name: value.format(folder=folder) if isinstance(value, str) else value
    for name, value in {**case.drafter_options, **case.rule_options}.items()
  }


def load(folder: Path, case: Case) -> Any:
  """Loads the decoder of a case."""
  draft_model = case.draft_model
  return specdec_jax.load(
    folder / case.target,
    drafter=case.drafter,
    draft_model=None if draft_model is None else folder / draft_model,
    verification=case.rule,
    temperature=case.temperature,
    **options_of(folder, case),
    **case.logits,
    **case.load,
  )


def _completion(completion: Any) -> Record:
  return exact(dataclasses.asdict(completion))


def python(folder: Path, case: Case) -> list[Record]:
  """`specdec_jax.generate`."""
  completions = specdec_jax.generate(
    load(folder, case), TEXTS, max_new_tokens=NUM_NEW, batch_size=len(TEXTS)
  )
  return [_completion(completion) for completion in completions]


def stream(folder: Path, case: Case) -> list[Record]:
  """`specdec_jax.stream`, of each text."""
  decoder, records = load(folder, case), []
  for text in TEXTS:
    pieces = specdec_jax.stream(decoder, text, max_new_tokens=NUM_NEW)
    record = {'pieces': list(pieces)}
    records.append(record | _completion(pieces.completion))
  return records


def model_flags(folder: Path, case: Case) -> list[object]:
  """Returns the flags that say what is decoded with."""
  flags: dict[str, Any] = {
    'model': folder / case.target,
    'drafter': case.drafter,
    'verification': case.rule,
    'temperature': case.temperature,
    **case.load,
    **options_of(folder, case),
    **case.logits,
  }
  if case.draft_model is not None:
    flags['draft_model'] = folder / case.draft_model
  argv: list[object] = []
  for name, value in flags.items():
    argv += [f'--{name}'] if value is True else [f'--{name}', value]
  return argv


def text_flags(folder: Path) -> list[object]:
  """Returns the flags that say which texts are decoded, and how far."""
  return [
    *('--prompts', folder / 'texts.txt'),
    *('--max_new_tokens', NUM_NEW),
    *('--batch_size', len(TEXTS)),
  ]


def flags(folder: Path, case: Case) -> list[Record]:
  """`specdec generate`."""
  output = run(
    'generate',
    *model_flags(folder, case),
    *text_flags(folder),
    *case.flags,
    *('--json', '-'),
  )
  return [exact(json.loads(line)) for line in output.splitlines()]


# The doors that are there: those of an extra are among its tests.
_DOORS: lazy.LazyTable[Callable[[Path, Case], list[Record]]] = lazy.LazyTable(
  {
    cases.PYTHON: 'tests.recorded.doors:python',
    cases.STREAM: 'tests.recorded.doors:stream',
    cases.FLAGS: 'tests.recorded.doors:flags',
    cases.GIN: 'tests.infer.recorded:gin_files',
    cases.T5X: 'tests.integrations.t5x.recorded:t5x_plugin',
  }
)


def decode(folder: Path, case: Case) -> dict[str, list[Record]]:
  """Decodes the texts through each door of a case that is there."""
  return {
    door: _DOORS[door](folder, case) for door in case.doors if door in _DOORS
  }
