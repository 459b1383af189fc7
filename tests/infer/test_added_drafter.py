"""`infer` with drafters that a user adds, as docs/extending.md says."""

import pytest

pytest.importorskip('gin')

from tests.assembly.test_extending import (  # noqa: F401
  GAMMA,
  NUM_NEW,
  added,
  folder,
  generated,
  load,
)
from tests.cli import tiny
from tests.infer import infer_runs


def test_gin_decodes_with_it(added, folder, capfd):  # noqa: F811
  completions = generated(load(folder, added.name, gamma=GAMMA))
  module = added.choice.__module__.rpartition('.')[2]
  own = folder / f'{added.name}.gin'
  own.write_text(
    'from __gin__ import dynamic_registration\n'
    f'from tests.assembly import {module}\n'
    'from specdec_jax.assembly import models\n'
    'from specdec_jax.infer import decoding\n'
    f'decoding.Decoding.make_drafter = @{module}.{added.choice.__name__}\n'
    f'{module}.{added.choice.__name__}.model = @drafter/models.Model()\n'
    f"drafter/models.Model.checkpoint = '{folder / added.name}'\n"
  )
  out = folder / f'out_{added.name}'
  argv = infer_runs.argv(
    folder / 'target',
    folder / 'task.jsonl',
    out,
    f'--gin_file={own}',
    infer_runs.gin_file('verification/greedy.gin'),
    TASK_FEATURE_LENGTHS=f"{{'inputs': 64, 'targets': {NUM_NEW}}}",
    Decoding__temperature=0.0,
  )
  result = tiny.run(capfd, *argv)
  assert result.status == 0, result.err
  records = infer_runs.records(infer_runs.result(out))
  assert [each['prediction'] for each in records] == [
    each.text for each in completions
  ]
