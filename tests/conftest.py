"""What every test runs under: strict arrays, eight devices, no warnings."""

import ctypes
import functools
import gc
import os
import pathlib
import resource
import sys
import tempfile
import time

# Eight devices; and the code of a small program is not cut into many modules,
# which takes longer than it saves where every core is busy.
_FLAGS = (
  '--xla_force_host_platform_device_count=8 '
  '--xla_cpu_parallel_codegen_split_count=1'
)
os.environ.setdefault('JAX_PLATFORMS', 'cpu')
# No lines of progress: how many there are depends on the machine.
os.environ.setdefault('SPECDEC_PROGRESS', '0')
if _FLAGS not in os.environ.get('XLA_FLAGS', ''):
  os.environ['XLA_FLAGS'] = f'{os.environ.get("XLA_FLAGS", "")} {_FLAGS}'

# What tests choose is theirs, and what users chose is none of theirs.
_CACHE = tempfile.TemporaryDirectory(prefix='specdec-tests-')
os.environ['XDG_CACHE_HOME'] = _CACHE.name

import jax  # noqa: E402
import pytest  # noqa: E402

jax.config.update('jax_numpy_rank_promotion', 'raise')
jax.config.update('jax_numpy_dtype_promotion', 'strict')
# Each operation would note the whole stack that made it, most of it pytest's.
jax.config.update('jax_include_full_tracebacks_in_locations', False)

pytest_plugins = ['tests.proof_report', 'tests.files.fixtures']


def pytest_configure(config):
  # Thousands of traced programs are a lot to look through, and little of it is
  # garbage.
  gc.freeze()
  gc.set_threshold(200_000, 50, 100)
  config.addinivalue_line('filterwarnings', 'error')
  # Compiling is most of the work: what one worker compiled, the others read,
  # and so do the commands, other processes and the next run. A file that is
  # being written cannot be read yet.
  config.addinivalue_line(
    'filterwarnings', 'ignore:Error reading persistent compilation cache'
  )
  if folder := compiled_folder(config):
    jax.config.update('jax_compilation_cache_dir', str(folder))
    jax.config.update('jax_persistent_cache_min_compile_time_secs', 0.0)
  if config.option.quick:
    jax.config.update('jax_disable_most_optimizations', True)
    # A third of the time to compile; later versions have no such flag.
    if jax.__version_info__[:2] == (0, 10):
      os.environ['XLA_FLAGS'] += ' --xla_cpu_use_fusion_emitters=false'


def compiled_folder(config) -> pathlib.Path | None:
  """Where compiled programs are kept, in pytest's cache; None without it
  (`-p no:cacheprovider`), and in a checkout that this user cannot write to."""
  cache = getattr(config, 'cache', None)
  if cache is None:
    return None
  try:
    folder = cache.mkdir('specdec_jax') / 'compiled'
    folder.mkdir(exist_ok=True)
  except OSError:
    config.addinivalue_line(
      'filterwarnings', 'ignore::pytest.PytestCacheWarning'
    )
    return None
  return folder if os.access(folder, os.W_OK) else None


def pytest_addoption(parser):
  parser.addoption(
    '--quick',
    action='store_true',
    help='compile quickly rather than as users do, without what is marked '
    '`optimized`: where the compiled program itself is looked at, or runs long',
  )


def pytest_collection_modifyitems(config, items):
  if config.option.quick:
    skip = pytest.mark.skip(reason='looks at what users run: without --quick')
    for item in items:
      if item.get_closest_marker('optimized'):
        item.add_marker(skip)


def pytest_runtest_setup():
  # Seconds since 1970, which `.ci/run` sets.
  end = float(os.environ.get('TESTS_END', 'inf'))
  if time.time() > end:
    pytest.skip('no time is left')


# A process can map 65,530 pieces of memory on Linux, and a compiled program
# takes about nine of them: thousands of programs end in an abort. A file of
# tests needs some 5,000; forgetting all programs takes seconds. Three workers
# also share the memory, and the models that tests keep are some of it.
_MANY_MAPS, _MUCH_MEMORY = 40_000, 4 * 2**30


def pytest_runtest_teardown(item, nextitem):
  if nextitem is None or nextitem.path == item.path or not _is_full():
    return
  for name, module in [*sys.modules.items()]:
    if name.startswith('tests.'):
      for value in vars(module).values():
        if isinstance(value, functools._lru_cache_wrapper):
          value.cache_clear()
  jax.clear_caches()
  gc.collect()
  # What was freed goes back to the system, in glibc.
  getattr(ctypes.CDLL(None), 'malloc_trim', lambda _: None)(0)


def _is_full() -> bool:
  """Tells whether this process has mapped too much, or has too much memory."""
  process = pathlib.Path('/proc/self')
  if not (process / 'maps').exists():
    return False
  size = (
    int((process / 'statm').read_text().split()[1]) * resource.getpagesize()
  )
  num_maps = (process / 'maps').read_bytes().count(b'\n')
  return size > _MUCH_MEMORY or num_maps > _MANY_MAPS


@pytest.fixture
def rng_key():
  return jax.random.key(0)
