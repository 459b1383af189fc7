"""For tests of the core that also concern an extra, which can be deleted."""

import pytest

from specdec_jax import lazy
from tests.test_layering import EXTRAS


def needs(extra: str) -> pytest.MarkDecorator:
  """Skips a test, or a row of one, where an extra is deleted.

  What is about an extra alone is among the extra's own tests.

  Args:
    extra: its folder, such as `contrib/ngram`.

  Raises:
    ValueError: there is no extra of this name.
  """
  if extra not in EXTRAS:
    raise ValueError(f'{extra} is none of the extras {sorted(EXTRAS)}')
  module = f'specdec_jax.{extra.replace("/", ".")}'
  return pytest.mark.skipif(
    not lazy.is_installed(module), reason=f'needs the extra {extra}'
  )
