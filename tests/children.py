"""Processes that tests start: they compile as quickly as the tests do, and
read what these have compiled."""

import contextlib
import os
import pathlib
import re
import signal
import subprocess
import sys

import jax

ROOT = pathlib.Path(__file__).parents[1]


def environment(num_devices: int = 1) -> dict[str, str]:
  """This process's environment, for one that sees `num_devices` devices."""
  flags = re.sub(
    r'(?<=platform_device_count=)\d+', str(num_devices), os.environ['XLA_FLAGS']
  )
  path = os.pathsep.join([str(ROOT), os.environ.get('PYTHONPATH', '')])
  return os.environ | {
    'PYTHONPATH': path,
    'XLA_FLAGS': flags,
    'JAX_DISABLE_MOST_OPTIMIZATIONS': '1',
    'JAX_INCLUDE_FULL_TRACEBACKS_IN_LOCATIONS': '0',
    'JAX_COMPILATION_CACHE_DIR': jax.config.jax_compilation_cache_dir or '',
    'JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS': '0',
  }


@contextlib.contextmanager
def starter():
  """Yields a function that starts Python with arguments, and what it may write
  to standard error in a pipe; what still runs in the end is killed."""
  # A script that puts the tests in the background has them ignore interrupts,
  # and what they start would inherit that.
  signal.signal(signal.SIGINT, signal.default_int_handler)
  started = []

  def call(*arguments, num_devices=1, cwd=None):
    process = subprocess.Popen(
      [sys.executable, *arguments],
      env=environment(num_devices),
      cwd=cwd,
      stdin=subprocess.DEVNULL,
      stdout=subprocess.DEVNULL,
      stderr=subprocess.PIPE,
      text=True,
    )
    started.append(process)
    return process

  try:
    yield call
  finally:
    for process in started:
      process.kill()
      process.wait()
      process.stderr.close()
