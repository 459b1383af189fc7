"""What a device lacks, and what libtpu asks of a machine without TPUs."""

import glob
import os

import jax

# The extra of specdec_jax for each device, by its name in `JAX_PLATFORMS`.
_EXTRAS = {'cuda': 'cuda', 'gpu': 'cuda', 'tpu': 'tpu'}

_ANSWERS = {
  'TPU_SKIP_MDS_QUERY': '1',
  'TPU_WORKER_HOSTNAMES': 'localhost',
  'TPU_ACCELERATOR_TYPE': 'v4-8',
  # A process that only compiles takes no chip from another.
  'ALLOW_MULTIPLE_LIBTPU_LOAD': 'true',
}


def answer_libtpu() -> None:
  """Answers libtpu's questions, before it is loaded to compile."""
  for variable, value in _ANSWERS.items():
    os.environ.setdefault(variable, value)


def hush_libtpu() -> None:
  """Answers libtpu's questions where jax found no chip and there is no device
  of one: otherwise it prints six lines before jax goes on without it."""
  devices = [*glob.glob('/dev/accel*'), *glob.glob('/dev/vfio/[0-9]*')]
  if os.environ.get('TPU_SKIP_MDS_QUERY') == '1' and not devices:
    answer_libtpu()


def missing() -> str | None:
  """Returns what to do if jax has no device of the kind that `JAX_PLATFORMS`
  names, or none at all; None if it has one."""
  try:
    jax.devices()
    return None
  except (RuntimeError, AssertionError) as error:  # The latter without a word.
    reason = str(error).partition(' (set JAX_PLATFORMS')[0]
  reason = reason and f' ({reason})'
  asked = os.environ.get('JAX_PLATFORMS')
  if not asked:
    return f'JAX has no device{reason}'
  extra = _EXTRAS.get(asked.split(',')[0].lower())
  how = f"pip install 'specdec_jax[{extra}]' where one is, or " if extra else ''
  return f'JAX has no device of JAX_PLATFORMS={asked}: {how}unset it{reason}'
