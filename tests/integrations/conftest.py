"""Imports T5X, where it is, before warnings are errors: it has its own."""

import contextlib
import warnings

with warnings.catch_warnings(), contextlib.suppress(ImportError):
  warnings.simplefilter('ignore')
  import t5x.models  # noqa: F401
