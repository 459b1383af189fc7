"""Imports T5X and Tunix, where they are, before warnings are errors: they have
their own."""

import contextlib
import warnings

with warnings.catch_warnings(), contextlib.suppress(ImportError):
  warnings.simplefilter('ignore')
  import t5x.models  # noqa: F401

with warnings.catch_warnings(), contextlib.suppress(ImportError):
  warnings.simplefilter('ignore')
  import tunix.rl.rl_cluster  # noqa: F401

  import tests.integrations.tunix.toy_tunix  # noqa: F401
