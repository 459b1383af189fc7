"""The device, the processor, and the environment that libtpu needs on a machine
without TPUs."""

import functools
import glob
import importlib.util
import os
import platform
import re
from pathlib import Path

import jax

from specdec_jax.files.require import install

# The extra of specdec_jax for each device, by its name in `JAX_PLATFORMS`.
_EXTRAS = {'cuda': 'cuda', 'gpu': 'cuda', 'tpu': 'tpu'}

_ANSWERS = {
  'TPU_SKIP_MDS_QUERY': '1',
  'TPU_WORKER_HOSTNAMES': 'localhost',
  'TPU_ACCELERATOR_TYPE': 'v4-8',
  # A process that only compiles may run beside another that uses the chips.
  'ALLOW_MULTIPLE_LIBTPU_LOAD': 'true',
}


def answer_libtpu() -> None:
  """Sets the environment variables that libtpu reads when it is loaded to
  compile; ValueError in a working directory that was deleted."""
  _check_directory()
  for variable, value in _ANSWERS.items():
    os.environ.setdefault(variable, value)


def prepare_libtpu() -> None:
  """Prepares libtpu, if it is installed, before jax looks for devices.

  Without a chip, the environment is set as by `answer_libtpu`, since libtpu
  would print six lines otherwise. ValueError as of `answer_libtpu`.
  """
  platforms = getattr(jax.config, 'jax_platforms', None) or 'tpu'
  if 'tpu' not in platforms or importlib.util.find_spec('libtpu') is None:
    return
  _check_directory()
  # jax sets this if it found no chip.
  has_none = os.environ.get('TPU_SKIP_MDS_QUERY') == '1'
  devices = [*glob.glob('/dev/accel*'), *glob.glob('/dev/vfio/[0-9]*')]
  if has_none and not devices:
    answer_libtpu()


def _check_directory() -> None:
  """Raises ValueError if the working directory was deleted: libtpu would end
  the process."""
  try:
    os.getcwd()
  except FileNotFoundError as error:
    raise ValueError(
      'the working directory was deleted, and libtpu needs one: change to '
      'another'
    ) from error


def missing() -> str | None:
  """Returns a message if jax has no device of `JAX_PLATFORMS`, or none at all;
  None if it has one."""
  try:
    jax.devices()
    return None
  except (RuntimeError, AssertionError) as error:  # The latter has no message.
    reason = str(error).partition(' (set JAX_PLATFORMS')[0]
  reason = reason and f' ({reason})'
  asked = os.environ.get('JAX_PLATFORMS')
  if not asked:
    return f'JAX has no device{reason}'
  extra = _EXTRAS.get(asked.split(',')[0].lower())
  how = f'{install(extra)}, on a machine that has one, or ' if extra else ''
  return f'JAX has no device of JAX_PLATFORMS={asked}: {how}unset it{reason}'


def processor() -> str:
  """Returns the processor's name as known to Linux, and 'without AVX-512' if it
  lacks that."""
  model = re.search(r'^model name\s*:\s*(.+)$', _cpuinfo(), re.M)
  name = model[1].strip() if model else f'{platform.machine()} CPU'
  return f'{name} without AVX-512' if lacks_avx512() else name


def device_name() -> str:
  """Returns the name of the first device; of a CPU with its number of cores."""
  device = jax.devices()[0]
  if device.platform != 'cpu':
    return device.device_kind
  return f'{processor()}, {os.cpu_count()} cores'


def load_per_core() -> float | None:
  """Returns the load average of the last minute per core; None if unknown."""
  try:
    one_minute, _, _ = os.getloadavg()
  except (AttributeError, OSError):
    return None
  return round(one_minute / (os.cpu_count() or 1), 2)


def is_intel() -> bool:
  """Returns whether Linux reports an Intel processor."""
  return 'GenuineIntel' in _cpuinfo()


def lacks_avx512() -> bool:
  """Returns whether Linux reports an x86 processor without AVX-512."""
  flags = re.search(r'^flags\s*:(.+)$', _cpuinfo(), re.M)
  return flags is not None and 'avx512f' not in flags[1].split()


@functools.cache
def _cpuinfo() -> str:
  try:
    return Path('/proc/cpuinfo').read_text()
  except OSError:
    return ''
