"""What tests run under, where pytest itself is asked for less."""

import types

import jax

from tests import conftest


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
