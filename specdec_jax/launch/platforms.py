"""What a device lacks, what processor this is, and what libtpu asks of a
machine without TPUs."""

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
  # A process that only compiles takes no chip from another.
  'ALLOW_MULTIPLE_LIBTPU_LOAD': 'true',
}


def answer_libtpu() -> None:
  """Answers libtpu's questions, before it is loaded to compile; ValueError in a
  working directory that was deleted."""
  _check_directory()
  for variable, value in _ANSWERS.items():
    os.environ.setdefault(variable, value)


def prepare_libtpu() -> None:
  """Prepares for jax to load libtpu, if it is installed, before jax looks for
  devices. Without a chip, its questions are answered, since it would print six
  lines before jax goes on without it. ValueError as of `answer_libtpu`."""
  platforms = getattr(jax.config, 'jax_platforms', None) or 'tpu'
  if 'tpu' not in platforms or importlib.util.find_spec('libtpu') is None:
    return
  _check_directory()
  # What jax sets where it found no chip.
  has_none = os.environ.get('TPU_SKIP_MDS_QUERY') == '1'
  devices = [*glob.glob('/dev/accel*'), *glob.glob('/dev/vfio/[0-9]*')]
  if has_none and not devices:
    answer_libtpu()


def _check_directory() -> None:
  """Raises ValueError in a working directory that was deleted, where libtpu
  would end the process."""
  try:
    os.getcwd()
  except FileNotFoundError as error:
    raise ValueError(
      'the working directory was deleted, and libtpu needs one: change to '
      'another'
    ) from error


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
  how = f'{install(extra)}, on a machine that has one, or ' if extra else ''
  return f'JAX has no device of JAX_PLATFORMS={asked}: {how}unset it{reason}'


def processor() -> str:
  """Names the processor, as far as Linux does, and that it has no AVX-512."""
  found = re.search(r'^model name\s*:\s*(.+)$', _cpuinfo(), re.M)
  name = found[1].strip() if found else f'{platform.machine()} CPU'
  return f'{name} without AVX-512' if lacks_avx512() else name


def device_name() -> str:
  """Names the device at hand; of a CPU with the number of its cores."""
  device = jax.devices()[0]
  if device.platform != 'cpu':
    return device.device_kind
  return f'{processor()}, {os.cpu_count()} cores'


def load_per_core() -> float | None:
  """Returns how many processes wanted a core in the last minute, for each core;
  None where the system does not tell."""
  try:
    one_minute, _, _ = os.getloadavg()
  except (AttributeError, OSError):
    return None
  return round(one_minute / (os.cpu_count() or 1), 2)


def is_intel() -> bool:
  """Tells whether the processor is Intel's, as far as Linux says so."""
  return 'GenuineIntel' in _cpuinfo()


def lacks_avx512() -> bool:
  """Tells whether this is an x86 processor without AVX-512, as far as Linux
  says so."""
  flags = re.search(r'^flags\s*:(.+)$', _cpuinfo(), re.M)
  return flags is not None and 'avx512f' not in flags[1].split()


@functools.cache
def _cpuinfo() -> str:
  try:
    return Path('/proc/cpuinfo').read_text()
  except OSError:
    return ''
