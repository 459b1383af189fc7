"""The fixtures of the tests of commands, and a job on a checkpoint of T5X."""

import pytest

from tests.checkpoints import tiny_t5
from tests.cli.conftest import (  # noqa: F401
  _compilation_cache,
  cache_home,
  generate,
  make_model,
  model,
  prompts_file,
  run,
)
from tests.infer import infer_runs
from tests.infer.infer_runs import argv


@pytest.fixture(scope='session')
def t5(tmp_path_factory):
  """The folder of the model."""
  return tiny_t5.write_model(tmp_path_factory.mktemp('t5'))


@pytest.fixture(scope='session')
def task(tmp_path_factory):
  """The file of examples."""
  path = tmp_path_factory.mktemp('task') / 'task.jsonl'
  infer_runs.write_task(path, infer_runs.NUM_EXAMPLES)
  return path


@pytest.fixture(scope='session')
def finished(tmp_path_factory):
  """The output folder of an uninterrupted run, and what it said; see `once`."""
  return tmp_path_factory.mktemp('finished') / 'out', {}


@pytest.fixture
def once(run, t5, task, finished):  # noqa: F811
  """Runs it once for all tests; the output folder and the result."""
  out, results = finished
  if not results:
    results['result'] = run(*argv(t5, task, out))
  return out, results['result']
