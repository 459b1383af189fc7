"""Two real processes, one lock."""

import os
import pathlib
import subprocess
import sys

import pytest

from specdec_jax.files.one_writer import one_writer
from tests.cli import tiny

ROOT = pathlib.Path(__file__).parent.parent.parent
HOLD = """
import importlib.util, sys, time
# Without the package's own imports, which take a second.
spec = importlib.util.spec_from_file_location('one_writer', sys.argv[1])
module = importlib.util.module_from_spec(spec)
spec.loader.exec_module(module)
with module.one_writer(sys.argv[2], 'out'):
  print('held', flush=True)
  time.sleep(60)
"""


@pytest.fixture
def holder(tmp_path):
  """Another process that holds the lock of this folder, and the lock."""
  lock = tmp_path / 'new' / 'run.lock'
  module = ROOT / 'specdec_jax' / 'files' / 'one_writer.py'
  process = subprocess.Popen(
    [sys.executable, '-c', HOLD, str(module), str(lock)],
    stdout=subprocess.PIPE,
    text=True,
  )
  assert process.stdout.readline() == 'held\n'
  yield process, lock
  process.kill()
  process.communicate()


def test_the_second_process_is_told_of_the_first(holder):
  process, lock = holder
  with (
    pytest.raises(ValueError, match=rf'process {process.pid} on .* is writing'),
    one_writer(lock, 'out'),
  ):
    pass


def test_a_killed_process_locks_nobody_out(holder):
  process, lock = holder
  process.kill()
  process.wait()
  assert lock.exists()
  with one_writer(lock, 'out'):
    assert f'process {os.getpid()} on' in lock.read_text()
  assert not lock.exists()


def test_a_full_disk_still_locks(tmp_path):
  """Though the lock cannot say whose it is; and it is removed."""
  lock = tmp_path / 'run.lock'
  with tiny.files_of_at_most(0), one_writer(lock, 'out'):
    with (
      pytest.raises(ValueError, match='another process is writing out'),
      one_writer(lock, 'out'),
    ):
      pass
    assert lock.exists()
  assert not lock.exists()


def test_a_file_that_its_owner_removed_is_not_locked(tmp_path, monkeypatch):
  """The owner ends between the second one's opening and its locking."""
  import fcntl

  lock = tmp_path / 'run.lock'
  flock, removed = fcntl.flock, []

  def late(file, flags):
    if not removed:
      removed.append(lock.unlink())
    flock(file, flags)

  monkeypatch.setattr(fcntl, 'flock', late)
  with (
    one_writer(lock, 'out'),
    pytest.raises(ValueError, match='is writing out'),
    one_writer(lock, 'out'),
  ):
    pass
