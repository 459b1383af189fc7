"""What libtpu asks of a machine without TPUs."""

import glob
import os

_ANSWERS = {
  'TPU_SKIP_MDS_QUERY': '1',
  'TPU_WORKER_HOSTNAMES': 'localhost',
  'TPU_ACCELERATOR_TYPE': 'v4-8',
  # One that only compiles takes no chip from another process.
  'ALLOW_MULTIPLE_LIBTPU_LOAD': 'true',
}


def answer_libtpu() -> None:
  """Answers libtpu's questions, before it is loaded to compile."""
  for variable, value in _ANSWERS.items():
    os.environ.setdefault(variable, value)


def hush_libtpu() -> None:
  """Does so where jax found no chip and there is no device of one: otherwise it
  prints six lines before jax goes on without it."""
  devices = [*glob.glob('/dev/accel*'), *glob.glob('/dev/vfio/[0-9]*')]
  if os.environ.get('TPU_SKIP_MDS_QUERY') == '1' and not devices:
    answer_libtpu()
