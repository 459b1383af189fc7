"""Types of what gin files bind."""

from collections.abc import Callable, Mapping, Sequence

import pytest

from specdec_jax.launch import gin_types


def function(
  *,
  count: int,
  rate: float = 0.5,
  name: str | None = None,
  flag: bool = False,
  sizes: Sequence[int] = (),
  lengths: Mapping[str, int] | None = None,
  schedule: float | Callable[[int], float] = 1.0,
  folders: str | Sequence[str] = '',
):
  del count, rate, name, flag, sizes, lengths, schedule, folders


def check(**bindings):
  macro = {'MACRO': bindings.pop('MACRO')} if 'MACRO' in bindings else {}
  gin_types.check(
    macro | {f'scope/module.function.{k}': v for k, v in bindings.items()},
    {'module.function': function}.__getitem__,
  )


def test_right_types_references_and_none_pass():
  check(count='3', rate='1', name="'x'", flag='True', sizes='(1, 2)')
  check(count='%MACRO', MACRO='4', schedule='@learning_rate()', name='None')
  check(count='None', lengths="{'inputs': 3}", schedule='0.1')
  check(folders="['a', 'b']", rate='1e-3', unknown="'what'")


def test_a_macro_of_itself_is_refused():
  with pytest.raises(ValueError, match='MACRO is defined by itself'):
    check(count='%MACRO', MACRO='%MACRO')


@pytest.mark.parametrize(
  ('binding', 'expected'),
  [
    ({'count': "'3'"}, "count is '3'"),
    ({'count': '3.0'}, 'count is 3.0'),
    ({'count': 'True'}, 'count is True'),
    ({'rate': "'0.1'"}, "rate is '0.1'"),
    ({'name': '3'}, 'name is 3'),
    ({'flag': '1'}, 'flag is 1'),
    ({'sizes': "(1, '2')"}, r'expected Sequence\[int\]'),
    ({'sizes': '3'}, 'sizes is 3'),
    ({'lengths': "{'inputs': '3'}"}, r'expected Mapping\[str, int\]'),
    ({'schedule': "'0.1'"}, r'float \| .*Callable'),
    ({'folders': '3'}, r'str \| .*Sequence'),
    ({'count': '%MACRO', 'MACRO': "'x'"}, "MACRO is 'x'"),
  ],
)
def test_wrong_types_are_refused(binding, expected):
  with pytest.raises(ValueError, match=expected):
    check(**binding)
