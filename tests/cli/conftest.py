"""Tiny models, made once, and where commands keep what they compile."""

import jax
import pytest

pytest.importorskip('safetensors')
pytest.importorskip('tokenizers')
pytest.importorskip('jinja2')

from jax.experimental.compilation_cache import compilation_cache

from tests import conftest
from tests.cli import tiny


@pytest.fixture(scope='session')
def cache_home(request, tmp_path_factory):
  """Where the commands' `specdec_jax/compiled` is that of all tests, too."""
  if folder := conftest.compiled_folder(request.config):
    return folder.parents[1]
  return tmp_path_factory.mktemp('cache')


@pytest.fixture(autouse=True)
def _compilation_cache(cache_home, monkeypatch):
  """The command turns the cache on for the whole process."""
  folder, seconds, is_hasty = (
    'jax_compilation_cache_dir',
    'jax_persistent_cache_min_compile_time_secs',
    'jax_disable_most_optimizations',
  )
  before = {name: getattr(jax.config, name) for name in (folder, seconds)}
  before[is_hasty] = jax.config.read(is_hasty)
  monkeypatch.setenv('XDG_CACHE_HOME', str(cache_home))
  for name in ('NO_COLOR', 'FORCE_COLOR', 'SPECDEC_TRACEBACK'):
    monkeypatch.delenv(name, raising=False)
  monkeypatch.setenv('JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS', '0')
  jax.config.update(folder, None)
  jax.config.update(seconds, 0.0)
  # Compiling takes longer than all that is decoded here.
  jax.config.update(is_hasty, True)
  compilation_cache.reset_cache()
  yield
  for name, value in before.items():
    jax.config.update(name, value)
  compilation_cache.reset_cache()


@pytest.fixture(scope='session')
def model(tmp_path_factory):
  """The path of a tiny random model."""
  return tiny.write_model(tmp_path_factory.mktemp('models') / 'tiny')


@pytest.fixture(scope='session')
def make_model(tmp_path_factory):
  """Writes further models; takes the arguments of `tiny.write_model`."""
  folder = tmp_path_factory.mktemp('more_models')
  return lambda name, **changes: tiny.write_model(folder / name, **changes)


@pytest.fixture
def prompts_file(tmp_path):
  """Eight prompts of different lengths."""
  path = tmp_path / 'prompts.txt'
  lines = ['the in ' * i + 'ab' for i in range(1, 9)]
  path.write_text('\n'.join(lines) + '\n')
  return path


@pytest.fixture
def run(capfd):
  """Runs the command: `run('generate', ...)`."""
  return lambda *argv: tiny.run(capfd, *argv)


@pytest.fixture
def generate(run, model, prompts_file):
  """Runs `generate`, on the tiny model and eight prompts unless told otherwise,
  where nothing should go wrong."""

  def call(*options, **changes):
    usual = {'--model': model, '--max_new_tokens': 8} | changes
    if '--prompt' not in options:
      usual |= {'--prompts': prompts_file}
    result = run('generate', *(each for item in usual.items() for each in item),
                 *options)  # fmt: skip
    assert (result.status, result.err) == (0, ''), result
    return result

  return call
