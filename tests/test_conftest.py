"""What tests run under, where pytest itself is asked for less."""

import types

import jax
import pytest

from tests import conftest, slow


def test_tests_run_without_the_cache_of_pytest():
  """With `-p no:cacheprovider` pytest's configuration has no `cache`."""
  lines = []
  before = jax.config.jax_compilation_cache_dir
  conftest.pytest_configure(
    types.SimpleNamespace(
      addinivalue_line=lambda name, line: lines.append(line),
      option=types.SimpleNamespace(quick=False),
    )
  )
  assert jax.config.jax_compilation_cache_dir == before
  assert 'error' in lines


def test_tests_end_in_time(monkeypatch):
  monkeypatch.setenv('TESTS_END', 'inf')
  conftest.pytest_runtest_setup()
  monkeypatch.setenv('TESTS_END', '0')
  with pytest.raises(pytest.skip.Exception, match='time'):
    conftest.pytest_runtest_setup()


def test_variations_are_slow():
  """All but those of `now`, which have to be among the values."""
  mark = slow.parametrize(('a', 'b'), [(1, 2), (3, 4)], now=[(1, 2)])
  first, second = mark.args[1]
  assert (first.values, [*first.marks]) == ((1, 2), [])
  assert [each.name for each in second.marks] == ['slow']
  with pytest.raises(ValueError, match='5'):
    slow.parametrize('a', [1, 2], now=[5])
