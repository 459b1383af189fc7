"""Packages that only some commands need."""

import importlib
from typing import Any


def require(module: str, *, extra: str, purpose: str) -> Any:
  """Imports a module of a package that may not be installed; an extra of
  specdec_jax has it, and the purpose is the subject of a sentence.

  Raises:
    ImportError: with the command that installs it.
  """
  try:
    return importlib.import_module(module)
  except ImportError as error:
    raise ImportError(
      f'{purpose} needs {module}: pip install specdec_jax[{extra}]'
    ) from error
