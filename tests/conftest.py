"""What every test runs under: strict arrays, eight devices, no warnings."""

import gc
import os

# Eight devices; and the code of a small program is not cut into many modules,
# which takes longer than it saves where every core is busy.
_FLAGS = (
  '--xla_force_host_platform_device_count=8 '
  '--xla_cpu_parallel_codegen_split_count=1'
)
os.environ.setdefault('JAX_PLATFORMS', 'cpu')
if _FLAGS not in os.environ.get('XLA_FLAGS', ''):
  os.environ['XLA_FLAGS'] = f'{os.environ.get("XLA_FLAGS", "")} {_FLAGS}'

import jax  # noqa: E402
import pytest  # noqa: E402

jax.config.update('jax_numpy_rank_promotion', 'raise')
jax.config.update('jax_numpy_dtype_promotion', 'strict')

pytest_plugins = ['tests.proof_report']


def pytest_configure(config):
  # Thousands of traced programs are a lot to look through, and little of it is
  # garbage.
  gc.freeze()
  gc.set_threshold(200_000, 50, 100)
  config.addinivalue_line('filterwarnings', 'error')
  # Compiling is most of the work: what one worker compiled, the others read,
  # and so does the next run. A file that is being written cannot be read yet.
  config.addinivalue_line(
    'filterwarnings', 'ignore:Error reading persistent compilation cache'
  )
  jax.config.update(
    'jax_compilation_cache_dir', str(config.cache.mkdir('compiled'))
  )
  jax.config.update('jax_persistent_cache_min_compile_time_secs', 0.0)


def pytest_addoption(parser):
  parser.addoption(
    '--optimized', action='store_true', help='compile all as users compile'
  )


@pytest.fixture(autouse=True, scope='module')
def compile_quickly(request):
  """Tests compile many programs and run each for milliseconds.

  A module marked `optimized` is compiled as users compile: where the compiled
  program itself is looked at, or runs for long. So is all with `--optimized`,
  as in `make proof`.
  """
  is_quick = (
    request.node.get_closest_marker('optimized') is None
    and not request.config.option.optimized
  )
  jax.config.update('jax_disable_most_optimizations', is_quick)


@pytest.fixture
def rng_key():
  return jax.random.key(0)
