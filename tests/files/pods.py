"""Commands that are killed, and commands of several processes."""

import signal

from tests.files import server as servers

# The command, killed when it would write another object than the first N.
KILLED = """
import os, signal, sys
from specdec_jax.cli import main
from specdec_jax.files import buckets

left = int(sys.argv[1])

def counted(write):
  def call(*args):
    global left
    left -= 1
    if left < 0:
      os.kill(os.getpid(), signal.SIGKILL)
    return write(*args)
  return call

for name in ('upload', 'create'):
  write = getattr(buckets.BucketPath, name)
  setattr(buckets.BucketPath, name, counted(write))
sys.exit(main.main(sys.argv[2:]))
"""


def assert_killed(process) -> None:
  said = process.communicate(timeout=480)[1]
  assert process.returncode == -signal.SIGKILL, said


def pod(start, num_writes, command) -> list:
  """Two hosts of four devices."""
  places = [
    f'--coordinator_address=localhost:{servers.free_port()}',
    '--process_count=2',
  ]
  return [
    start(num_writes, *command, *places, f'--process_index={i}', num_devices=4)
    for i in range(2)
  ]


def assert_done(processes) -> None:
  for process in processes:
    said = process.communicate(timeout=480)[1]
    assert process.returncode == 0, said
