"""A family of networks that a test adds, and `infer`."""

import json

import pytest

pytest.importorskip('gin')

from tests.cli import tiny
from tests.contracts.test_families import table_folder  # noqa: F401
from tests.infer import infer_runs


def test_beams_of_an_added_family_without_placements_are_refused(
  capfd,
  table_folder,  # noqa: F811
  tmp_path,
):
  task = tmp_path / 'task.jsonl'
  task.write_text(json.dumps({'inputs': 'ab', 'targets': 'ab'}) + '\n')
  argv = infer_runs.argv(
    table_folder,
    task,
    tmp_path / 'out',
    Decoding__num_decodes=2,
    TASK_FEATURE_LENGTHS="{'inputs': 12, 'targets': 8}",
  )
  result = tiny.run(capfd, *argv)
  assert result.status == 2
  assert 'takes no placements' in result.err
