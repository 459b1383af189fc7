"""Packages that only some commands need."""

import importlib
from typing import Any


def require(module: str, *, extra: str, purpose: str) -> Any:
  """Imports a module that may not be installed.

  Args:
    module: its full name.
    extra: the extra of specdec_jax that installs it.
    purpose: what needs it, the subject of the message.

  Raises:
    ImportError: with the command that installs it.
  """
  try:
    return importlib.import_module(module)
  except ImportError as error:
    raise ImportError(
      f'{purpose} needs {module}: pip install specdec_jax[{extra}]'
    ) from error
