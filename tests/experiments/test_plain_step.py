"""The table of a plain step's operations, from a trace and a program."""

import pytest

from experiments.plain_step import __main__ as plain_step

_HLO = """
  %weights = f32[576,3072]{1,0} parameter(0)
  %rows.1 = f32[576,1]{1,0} parameter(1)
  %dot.7 = f32[1,3072]{1,0} dot(%rows.1, %weights), lhs_contracting_dims={0}
  %dot.8 = f32[1,3072]{1,0} dot(%rows.1, %weights), lhs_contracting_dims={0}
  %add_fusion.3 = f32[1,3072]{1,0} fusion(%dot.7, %dot.8), kind=kLoop
  %tiny.1 = f32[] add(%a, %b)
"""


def _event(name, microseconds):
  return {'ph': 'X', 'name': name, 'dur': microseconds}


@pytest.mark.parametrize(('dtype', 'rate'), [('f32', '35.4'), ('bf16', '17.7')])
def test_operations_are_summed_by_kind_and_shape(dtype, rate):
  events = [
    *(_event('dot.7', 300), _event('dot.8', 100)) * 2,
    _event('add_fusion.3', 200),
    _event('tiny.1', 1),
    _event('ThunkExecutor::Execute', 5000),
    {'ph': 'M', 'name': 'dot.7'},
  ]
  hlo = _HLO.replace('%weights = f32', f'%weights = {dtype}')
  rows = plain_step.summed(events, hlo, num_steps=2)
  assert rows == [
    {
      'operation': 'dot',
      'shapes': '576,1 by 576,3072',
      'per step': '2',
      'ms per step': '0.40',
      'share': '80%',
      # 4 or 2 times 576 * 3072 bytes in 200 microseconds.
      'GB/s': rate,
    },
    {
      'operation': 'add_fusion',
      'shapes': '',
      'per step': '0',
      'ms per step': '0.10',
      'share': '20%',
      'GB/s': '',
    },
  ]
