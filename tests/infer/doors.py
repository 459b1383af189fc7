"""Decoding through gin files, for the contract of doors."""

import dataclasses
import pathlib
import tempfile

from specdec_jax.assembly.drafters import DRAFTERS
from specdec_jax.assembly.rules import RULES
from tests.cli import tiny
from tests.contracts.doors import (
  NUM_NEW,
  SETTINGS,
  TEXTS,
  Case,
  Decoded,
  Doors,
  decoded,
  fields_of,
)
from tests.infer import infer_runs


def gin(doors: Doors, case: Case, capfd) -> list[Decoded]:
  """`specdec infer`, with the files of the drafter and of the rule."""
  options = fields_of(doors.folder, case)
  bindings = {
    'TASK_FEATURE_LENGTHS': f"{{'inputs': 64, 'targets': {NUM_NEW}}}",
    'Decoding.batch_size': len(TEXTS),
    'Decoding.temperature': case.temperature,
  }
  bindings |= {f'Decoding.{n}': x for n, x in SETTINGS[case.settings].items()}
  if 'ngram_text' in options:
    bindings['DRAFTER_TEXT'] = repr(options['ngram_text'])
  if (doors.folder / case.drafter).exists():
    model = doors.folder / case.drafter
    bindings['DRAFTER_CHECKPOINT_PATH'] = repr(str(model))
  for module, choice in (
    ('drafters', DRAFTERS[case.drafter]),
    ('rules', RULES[case.rule]),
  ):
    for field in dataclasses.fields(choice):
      if field.name in options and field.name != 'ngram_text':
        name = f'{module}.{choice.__name__}.{field.name}'
        value = options[field.name]
        bindings[name] = repr(value) if field.name == 'suffix_text' else value
  out = pathlib.Path(tempfile.mkdtemp(dir=doors.folder)) / 'out'
  argv = infer_runs.argv(
    doors.folder / case.target,
    doors.folder / 'task.jsonl',
    out,
    infer_runs.gin_file(f'drafters/{case.drafter}.gin'),
    infer_runs.gin_file(f'verification/{case.rule}.gin'),
    **bindings,
  )
  result = tiny.run(capfd, *argv)
  assert result.status == 0, result.err
  return [
    decoded(record['prediction'], record['aux'])
    for record in infer_runs.records(infer_runs.result(out))
  ]
