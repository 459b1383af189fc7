"""Packages that only some commands need."""

import importlib
from typing import Any


def require(module: str, *, extra: str, purpose: str) -> Any:
  """Imports a module by its full name; raises ImportError, with what needs it
  (`purpose`) and the command that installs an extra of specdec_jax with it."""
  try:
    return importlib.import_module(module)
  except ImportError as error:
    raise ImportError(f'{purpose} needs {module}: {install(extra)}') from error


def install(extra: str) -> str:
  """Returns the command that installs an extra of specdec_jax, and where."""
  return f"pip install -e '.[{extra}]' in the clone of specdec_jax"
