"""Which variations of a test wait for `make test-all`.

`make test` has a promise once; another model, drafter or size that is tested in
the same way is marked `slow`.
"""

from collections.abc import Iterable, Sequence

import pytest

_Param = type(pytest.param())


def parametrize(
  names: str | Sequence[str], values: Iterable, *, now: Iterable, **options
) -> pytest.MarkDecorator:
  """`pytest.mark.parametrize`, where all values but those of `now` are slow;
  raises ValueError if one of `now` is none of them."""
  left, params = list(now), []
  for value in values:
    if not isinstance(value, _Param):
      value = pytest.param(*([value] if isinstance(names, str) else value))
    given = value.values[0] if isinstance(names, str) else value.values
    if given in left:
      left.remove(given)
    else:
      value = pytest.param(
        *value.values, marks=[*value.marks, pytest.mark.slow]
      )
    params.append(value)
  if left:
    raise ValueError(f'{names}: {left} are none of the values')
  return pytest.mark.parametrize(names, params, **options)
