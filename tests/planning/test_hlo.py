"""What is read from a program's optimised HLO."""

import functools
import math

import jax
import jax.numpy as jnp
import pytest

from specdec_jax.models import attention
from specdec_jax.planning import hlo
from specdec_jax.planning.trip_counts import trip_count
from tests.planning import copies

# As the TPU compiler writes them: S(1) is memory on the chip.
_TPU = """
HloModule step, is_scheduled=true

%slice_and_add (p0: bf16[64,128], p1: s32[]) -> bf16[1,128] {
  %p0 = bf16[64,128]{1,0:T(8,128)(2,1)} parameter(0)
  %p1 = s32[]{:T(128)} parameter(1)
  %row = bf16[1,128]{1,0:T(8,128)} dynamic-slice(%p0, %p1, %p1), dynamic_slice_sizes={1,128}
  ROOT %sum = bf16[1,128]{1,0:T(8,128)S(1)} add(%row, %row)
}

%write (q0: bf16[64,128], q1: bf16[1,128], q2: s32[]) -> bf16[64,128] {
  %q0 = bf16[64,128]{1,0:T(8,128)(2,1)} parameter(0)
  %q1 = bf16[1,128]{1,0:T(8,128)S(1)} parameter(1)
  %q2 = s32[]{:T(128)} parameter(2)
  ROOT %put = bf16[64,128]{1,0:T(8,128)(2,1)} dynamic-update-slice(%q0, %q1, %q2, %q2)
}

%renamed (r0: bf16[32,128]) -> bf16[4096] {
  %r0 = bf16[32,128]{1,0} parameter(0)
  ROOT %flat = bf16[4096]{0} bitcast(%r0)
}

%whole (s0: bf16[32,128]) -> f32[128] {
  %s0 = bf16[32,128]{1,0} parameter(0)
  %same = bf16[4096]{0} fusion(%s0), kind=kLoop, calls=%renamed
  ROOT %total = f32[128]{0:T(128)S(1)} reduce(%same), to_apply=%add
}

ENTRY %main (a: bf16[64,128], b: s32[], w: bf16[32,128]) -> bf16[64,128] {
  %a = bf16[64,128]{1,0:T(8,128)(2,1)} parameter(0)
  %b = s32[]{:T(128)} parameter(1)
  %w = bf16[32,128]{1,0} parameter(2)
  %first = bf16[1,128]{1,0:T(8,128)S(1)} fusion(%a, %b), kind=kLoop, calls=%slice_and_add, backend_config={"estimated_cycles":"600"}
  %start = (bf16[32,128]{1,0:S(1)}, bf16[32,128]{1,0}, u32[]{:S(2)}) copy-start(%w)
  %done = bf16[32,128]{1,0:S(1)} copy-done(%start)
  %sums = f32[128]{0:T(128)S(1)} fusion(%w), kind=kLoop, calls=%whole, backend_config={"estimated_cycles":"5000"}
  %all = f32[128]{0:T(128)S(1)} all-reduce(%sums), replica_groups={{0,1}}, to_apply=%add
  ROOT %out = bf16[64,128]{1,0:T(8,128)(2,1)} fusion(%a, %first, %b), kind=kLoop, calls=%write, backend_config={"estimated_cycles":"700"}
}
"""  # noqa: E501


def test_bytes_count_where_they_cross_into_main_memory():
  row, weights = 2 * 128, 2 * 32 * 128
  cost = hlo.Program(_TPU).cost()
  # The row that is read and the row that is written, not the 64 around them;
  # the weights twice, for the copy onto the chip and for the sum, whose inner
  # fusion only renames them; the index, where a fusion reads it.
  assert cost.memory_bytes == pytest.approx(2 * row + 2 * weights, abs=16)
  assert cost.num_instructions == 4
  assert cost.collectives == (hlo.Collective(4 * 128, 2),)  # Of two chips.
  assert cost.cycles == 6300
  assert sorted(cost.small_cycles) == [600, 700, 5000]


def test_a_loop_s_body_counts_as_often_as_it_runs():
  def repeat(count):
    body = lambda _, x: jnp.sin(x @ x)
    return jax.jit(lambda x: jax.lax.fori_loop(0, count, body, x))

  x = jnp.ones((64, 64))
  costs = [
    hlo.Program(repeat(n).lower(x).compile().as_text()).cost() for n in (10, 20)
  ]
  per_trip = (costs[1].memory_bytes - costs[0].memory_bytes) / 10
  # Reads x twice over, writes the product, reads it and writes the sine.
  assert 4 * 64 * 64 * 2 <= per_trip <= 4 * 64 * 64 * 6


def test_a_copy_counts_unless_it_only_moves_onto_the_chip_or_back():
  text = """
HloModule loop, is_scheduled=true

%flip (f0: f32[8,16]) -> f32[16,8] {
  %f0 = f32[8,16]{1,0} parameter(0)
  ROOT %turned = f32[16,8]{1,0} transpose(%f0), dimensions={1,0}
}

%mix (m0: f32[8,16]) -> f32[8] {
  %m0 = f32[8,16]{1,0} parameter(0)
  %inside = f32[8,16]{0,1} copy(%m0)
  ROOT %sums = f32[8]{0} reduce(%inside), to_apply=%add
}

%body (s: (f32[8,16])) -> (f32[8,16]) {
  %s = (f32[8,16]{1,0}) parameter(0)
  %x = f32[8,16]{1,0} get-tuple-element(%s), index=0
  %onto_chip = f32[8,16]{1,0:S(1)} copy(%x)
  %read = f32[8]{0} fusion(%x), kind=kLoop, calls=%mix
  %small = f32[8]{0} copy(%read)
  %flipped = f32[16,8]{1,0} fusion(%x), kind=kLoop, calls=%flip
  %back = f32[8,16]{1,0} copy(%onto_chip)
  %turned = f32[8,16]{0,1:S(1)} copy(%onto_chip)
  %again = f32[8,16]{1,0} copy(%x)
  ROOT %next = (f32[8,16]{1,0}) tuple(%back)
}

ENTRY %main (a: f32[8,16]) -> (f32[8,16]) {
  %a = f32[8,16]{1,0} parameter(0)
  %before = f32[8,16]{1,0} copy(%a)
  %start = (f32[8,16]{1,0}) tuple(%before)
  ROOT %loop = (f32[8,16]{1,0}) while(%start), condition=%done, body=%body
}
"""
  found = copies.in_loops(hlo.Program(text), 8 * 16)
  assert found == ['flipped', 'turned', 'again']


# Of an array of 64 rows, each of n chips has all rows or 64 / n.
_ROW = 2 * 128
_COLLECTIVES = """
HloModule exchange, is_scheduled=true, num_partitions=4

%async_computation (q0: bf16[64,128]) -> bf16[{rows},128] {{
  %q0 = bf16[64,128]{{1,0}} parameter(0)
  ROOT %inner = bf16[{rows},128]{{1,0}} reduce-scatter(%q0), channel_id=2, {groups}, dimensions={{0}}, to_apply=%add
}}

%all-reduce-scatter.1 (r0: bf16[64,128]) -> bf16[{rows},128] {{
  %r0 = bf16[64,128]{{1,0}} parameter(0)
  %added = bf16[64,128]{{1,0}} all-reduce(%r0), channel_id=3, {groups}, to_apply=%add
  ROOT %kept = bf16[{rows},128]{{1,0}} dynamic-slice(%added), dynamic_slice_sizes={{{rows},128}}
}}

%body (s: (s32[], bf16[64,128])) -> (s32[], bf16[64,128]) {{
  %s = (s32[], bf16[64,128]{{1,0}}) parameter(0)
  %full = bf16[64,128]{{1,0}} get-tuple-element(%s), index=1
  %share = bf16[{rows},128]{{1,0}} slice(%full), slice={{[0:{rows}], [0:128]}}
  %x = {exchange}
  %i = s32[] get-tuple-element(%s), index=0
  %one = s32[] constant(1)
  %more = s32[] add(%i, %one)
  ROOT %next = (s32[], bf16[64,128]{{1,0}}) tuple(%more, %full)
}}

%go (t: (s32[], bf16[64,128])) -> pred[] {{
  %three = s32[] constant(3)
  %t = (s32[], bf16[64,128]{{1,0}}) parameter(0)
  %j = s32[] get-tuple-element(%t), index=0
  ROOT %lt = pred[] compare(%j, %three), direction=LT
}}

ENTRY %main (a: bf16[64,128]) -> (s32[], bf16[64,128]) {{
  %a = bf16[64,128]{{1,0}} parameter(0)
  %zero = s32[] constant(0)
  %start = (s32[], bf16[64,128]{{1,0}}) tuple(%zero, %a)
  ROOT %loop = (s32[], bf16[64,128]{{1,0}}) while(%start), condition=%go, body=%body
}}
"""  # noqa: E501
# Beside each at once: started only, and wrapped in a computation.
_FORMS = {
  'all-reduce': (
    'bf16[64,128] all-reduce(%full), {groups}, to_apply=%add',
    'bf16[64,128] all-reduce-start(%full), {groups}, to_apply=%add',
  ),
  'reduce-scatter': (
    'bf16[{rows},128] reduce-scatter(%full), {groups}, to_apply=%add',
    '((bf16[64,128]), bf16[{rows},128]) reduce-scatter-start(%full), {groups}',
    '((bf16[64,128]), bf16[{rows},128]) async-start(%full), '
    'calls=%async_computation',
    'bf16[{rows},128] fusion(%full), kind=kCustom, calls=%all-reduce-scatter.1',
  ),
  'all-gather': (
    'bf16[64,128] all-gather(%share), {groups}, dimensions={{0}}',
    '(bf16[{rows},128], bf16[64,128]) all-gather-start(%share), {groups}',
  ),
}


def collectives(exchange: str, groups: str, size: int) -> hlo.Cost:
  names = {'groups': f'replica_groups={groups}', 'rows': 64 // size}
  text = _COLLECTIVES.format(exchange=exchange.format(**names), **names)
  return hlo.Program(text).cost()


@pytest.mark.parametrize(
  ('groups', 'size'),
  [
    ('{}', 4),
    ('{{0,1,2,3}}', 4),
    ('[1,4]<=[4]', 4),
    ("mesh['a'=1,'b'=2,'c'=2] {'b','c'}", 4),
    ('{{0,1},{2,3}}', 2),
    ('[2,2]<=[4]', 2),
    ('[2,2]<=[2,2]T(1,0)', 2),
    ("mesh['a'=2,'b'=2], device_ids=([2,2]T(1,0)) {'a'}", 2),
    ("mesh['a'=4] {'a':(2)2}", 2),
  ],
)
def test_an_all_reduce_is_a_reduce_scatter_and_an_all_gather(groups, size):
  """In a loop of three trips, on rings as large as the groups of chips."""
  # Each chip hands on all shares but one, and in an all-reduce does so twice.
  half = hlo.Collective((64 - 64 // size) * _ROW, size - 1)
  whole = hlo.Collective(2 * half.sent_bytes, 2 * half.num_hops)
  for kind, forms in _FORMS.items():
    expected = whole if kind == 'all-reduce' else half
    for form in forms:
      found = collectives(form, groups, size)
      assert found.collectives == (expected,) * 3, form


def test_several_arrays_are_exchanged_in_one_collective():
  several = '(bf16[64,128], bf16[16,128]) all-reduce(%full, %share), {groups}'
  cost = collectives(several, '{{0,1,2,3}}', 4)
  assert cost.collectives[0] == hlo.Collective(2 * (64 + 16) * 3 / 4 * _ROW, 6)


def test_sums_are_spread_in_their_own_type():
  wide = 'f32[64,128] convert(%full)'
  narrow = 'bf16[64,128] all-reduce(%x), {groups}, to_apply=%add'
  cost = collectives(f'{wide}\n  %y = {narrow}', '{}', 4)
  assert cost.collectives[0] == hlo.Collective(3 / 4 * (2 + 1) * 64 * _ROW, 6)


def test_a_permutation_sends_what_a_chip_has_to_one_other():
  to_next = '(bf16[64,128], bf16[64,128], u32[]{{:S(2)}}, u32[]{{:S(2)}}) '
  to_next += 'collective-permute-start(%full), source_target_pairs={{{{0,1}}}}'
  cost = collectives(to_next, '{}', 4)
  assert cost.collectives == (hlo.Collective(64 * _ROW, 1),) * 3
  # The slice beside it reads and writes 16 rows, and the counter is a word.
  assert cost.memory_bytes == 3 * (2 * (64 + 16) * _ROW + 3 * 4)


def test_text_that_is_no_module_is_refused():
  with pytest.raises(ValueError, match='no ENTRY'):
    hlo.Program('%f = f32[] constant(0)')


@pytest.fixture
def named():
  """Programs name their loops, as users' do; those of tests are shorter."""
  jax.config.update('jax_include_full_tracebacks_in_locations', True)
  yield
  jax.config.update('jax_include_full_tracebacks_in_locations', False)


@pytest.mark.usefixtures('named')
def test_a_loop_over_a_cache_runs_as_often_as_its_rows_need():
  queries, cache = jnp.ones((1, 2, 1, 64)), jnp.ones((1, 2, 700, 64))
  mask = jnp.ones((1, 1, 700), bool)
  attend = functools.partial(attention.attend, scale=1.0, used_only=True)
  text = jax.jit(attend).lower(queries, cache, cache, mask).compile().as_text()
  assert 'blocks_of_256_in_700/while' in text

  def num_bytes(context: float = math.inf) -> float:
    count_fn = functools.partial(trip_count, context=context)
    return hlo.Program(text, count_fn).cost().memory_bytes

  block = num_bytes(512) - num_bytes(256)
  # Keys and values are read at least, and of 700 entries there are 3 blocks.
  assert block > 2 * cache[:, :, :256].nbytes
  assert num_bytes(256) == num_bytes(1)
  assert num_bytes() == num_bytes(9999) == num_bytes(256) + 2 * block


@pytest.mark.parametrize(('end', 'count'), [('', 4.625), ('_on_2', 2.8517)])
def test_a_loop_over_experts_runs_once_for_each_that_was_chosen(end, count):
  """On average: of 8 experts of which each token chooses 2, three tokens choose
  8 (1 - .75^3) = 4.625; on the busier of two devices with 4 each, this many.
  Its body reads 4,000 bytes."""
  text = """HloModule experts

%body (p: (s32[], f32[1000])) -> (s32[], f32[1000]) {
  %p = (s32[], f32[1000]{0}) parameter(0)
  %i = s32[] get-tuple-element(%p), index=0
  %x = f32[1000]{0} get-tuple-element(%p), index=1
  %y = f32[1000]{0:S(1)} negate(%x)
  ROOT %t = (s32[], f32[1000]{0}) tuple(%i, %x)
}

%test (q: (s32[], f32[1000])) -> pred[] {
  %q = (s32[], f32[1000]{0}) parameter(0)
  ROOT %c = pred[] constant(false)
}

ENTRY %main (a: (s32[], f32[1000])) -> (s32[], f32[1000]) {
  %a = (s32[], f32[1000]{0}) parameter(0)
  ROOT %w = (s32[], f32[1000]{0}) while(%a), condition=%test, body=%body, metadata={op_name="jit(f)/experts_2_of_8_for_3/while"}
}
"""  # noqa: E501
  cost = hlo.Program(text.replace('for_3', f'for_3{end}')).cost()
  assert cost.memory_bytes == pytest.approx(count * 4000, rel=1e-4)
