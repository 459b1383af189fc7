"""Costs on slices that are not there. Those marked `tpu` run its compiler."""

import _thread
import contextlib
import dataclasses
import functools
import importlib.util
import sys
import threading
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import (
  Mesh,
  NamedSharding,
  PartitionSpec,
  SingleDeviceSharding,
)

from specdec_jax.assembly import decoder as decoder_lib
from specdec_jax.assembly.drafters import DRAFTERS
from specdec_jax.assembly.lengths import Fixed
from specdec_jax.assembly.models import Model
from specdec_jax.assembly.text_settings import TextSettings
from specdec_jax.decoding.program import Part
from specdec_jax.launch import progress
from specdec_jax.models import families, presets
from specdec_jax.planning import aot, hlo, parts, planner, workloads
from specdec_jax.planning.chips import CHIPS
from specdec_jax.sharding import mesh as mesh_lib
from tests import toy
from tests.planning import copies

needs_libtpu = pytest.mark.skipif(
  importlib.util.find_spec('libtpu') is None,
  reason='needs libtpu: pip install -e ".[tpu]"',
)


def decoder_of(target: str, draft: str | None, drafter: str = 'model'):
  return workloads.decoder_of(target, drafter, draft, dtype='bfloat16')


def task(topology: str, target: str, draft: str, **changes):
  slice_ = aot.find_slice(topology)
  sizes = {'batch_size': 1, 'input_length': 512, 'output_length': 128} | changes
  return workloads.Workload(
    slice=slice_,
    decoder=decoder_of(target, draft),
    num_partitions=workloads.default_num_partitions(
      slice_, sizes['batch_size']
    ),
    **sizes,
  )


def test_chips_share_a_copy_as_the_rows_need():
  """Six chips do not divide into copies of four."""
  six = aot.Slice(name='six', chip=CHIPS['v4'], devices=jax.devices()[:6])
  found = [workloads.default_num_partitions(six, n) for n in (1, 2, 3, 6)]
  assert found == [6, 3, 2, 1]


def test_without_a_chain_the_drafts_differ_by_the_further_tokens():
  fields = [field.name for field in dataclasses.fields(aot.ProgramCost)]
  figures = (50, 60, 70, 10, 15)
  costs = [aot.ProgramCost(**dict.fromkeys(fields, each)) for each in figures]
  chain = parts.costs_of(12, costs)
  assert (chain.draft_seconds, chain.c_hat) == (15, 15 / 50)
  whole = parts.costs_of(12, costs, is_chain=False)
  assert (whole.draft_seconds, whole.c_hat) == (5 / 11, 5 / 11 / 50)
  assert whole.first_draft_seconds == chain.first_draft_seconds == 10
  # A longer draft that was found no dearer costs no more.
  assert parts.costs_of(12, [*costs[:3], *costs[:2:-1]], (), False).c_hat == 0
  # Costs of gamma 1 have no further token to tell apart.
  costs = [*costs[:2], costs[4], costs[4]]
  assert parts.costs_of(1, costs, is_chain=False).draft_seconds == 15


@pytest.mark.parametrize(
  ('name', 'bits'),
  [
    *(('int4', 4), ('int8', 8), ('bfloat16', 16)),
    *(('threefry2x32', 64), ('rbg', 128)),
  ],
)
def test_bytes_are_those_of_each_chip(name, bits):
  is_key = name in ('threefry2x32', 'rbg')
  dtype = jax.random.key(0, impl=name).dtype if is_key else jnp.dtype(name)
  whole = jax.ShapeDtypeStruct((8, 6), dtype)
  places = mesh_lib.make(num_partitions=2, devices=jax.devices()[:4])
  split = NamedSharding(places, PartitionSpec(None, 'model'))
  halves = mesh_lib.with_shardings([whole] * 2, [split] * 2)
  # 48 values on one chip, or two halves of 48 on each.
  assert mesh_lib.tree_bytes(whole) == 48 * bits // 8
  assert mesh_lib.tree_bytes(halves) == 48 * bits // 8


def test_what_is_compiled_for_a_slice_is_not_kept(tmp_path):
  settings = {
    'jax_compilation_cache_dir': str(tmp_path),
    'jax_enable_compilation_cache': True,
    'jax_persistent_cache_min_compile_time_secs': 0.0,
  }
  before = {name: getattr(jax.config, name) for name in settings}
  compiled = lambda n: jax.jit(lambda x: x + n).lower(1.0).compile()
  for name, value in settings.items():
    jax.config.update(name, value)
  cache = aot.compilation_cache
  try:
    cache.reset_cache()
    sizes = []
    for n, how in enumerate(
      (contextlib.nullcontext(), aot._without_cache(), contextlib.nullcontext())
    ):
      with how:
        compiled(n)
      sizes.append(len([*tmp_path.iterdir()]))
    assert 0 < sizes[0] == sizes[1] < sizes[2]
  finally:
    for name, value in before.items():
      jax.config.update(name, value)
    cache.reset_cache()


def test_an_interrupt_is_answered_while_a_program_is_compiled():
  is_over, ended = threading.Event(), []

  class Lowered:
    def compile(self, compiler_options):
      is_over.wait(0.2)  # By then the others wait for this.
      _thread.interrupt_main()
      is_over.wait(5)
      ended.append(compiler_options)

  part = types.SimpleNamespace(lower=Lowered)
  with pytest.raises(KeyboardInterrupt):
    aot.compile_all([aot.Job(part, mesh=None)])
  assert not ended
  is_over.set()
  for thread in threading.enumerate():
    if thread.name == progress.THREAD:
      thread.join()


@pytest.mark.parametrize('name', ['v9:2x2', 'v4', 'v4:2x2', 'v5e:2x2x1', ''])
def test_a_slice_that_there_cannot_be_is_refused(name):
  with pytest.raises(ValueError, match=r'topology|dimensions'):
    aot.find_slice(name)


def test_more_positions_than_a_model_has_are_refused():
  nowhere = aot.Slice(name='v4:1x1x1', chip=CHIPS['v4'], devices=())
  sizes = {'batch_size': 1, 'output_length': 128, 'num_partitions': 1}
  sizes['decoder'] = decoder_of('smollm2_135m', 'smollm2_135m')
  with pytest.raises(ValueError, match=r'input_length 8100.*8228.*8192'):
    workloads.Workload(slice=nowhere, **sizes, input_length=8100)
  workloads.Workload(slice=nowhere, **sizes, input_length=8064)


def test_without_libtpu_the_extra_is_named(monkeypatch):
  monkeypatch.setitem(sys.modules, 'libtpu', None)
  with pytest.raises(ImportError, match=r"pip install -e '\.\[tpu\]'"):
    aot.find_slice('v4:1x1x1')


@pytest.mark.parametrize(
  ('name', 'units', 'size', 'rate', 'clock'),
  [
    # Google's paper on v4 (arXiv 2304.01433) states 1050 MHz.
    ('v4', 8, 128, 1, 1.05e9),
    ('v5e', 4, 128, 1, 1.50e9),
    ('v5p', 8, 128, 1, 1.75e9),
    ('v6e', 2, 256, 2, 1.75e9),
  ],
)
def test_a_peak_is_what_the_matrix_units_do_in_a_second(
  name, units, size, rate, clock
):
  chip = CHIPS[name]
  assert (chip.num_matrix_units, chip.matrix_size) == (units, size)
  assert units * size**2 * rate * 2 * clock == pytest.approx(
    chip.peak_flops, rel=3e-3
  )
  assert chip.clock == pytest.approx(clock, rel=3e-3)


@pytest.mark.tpu
@needs_libtpu
@pytest.mark.parametrize(
  'name', ['v4:1x1x1', 'v5e:1x1', 'v5p:1x1x1', 'v6e:1x1']
)
def test_the_compiler_counts_as_many_multiply_adds_per_cycle(name):
  """Near the peak, and never beyond it."""
  slice_ = aot.find_slice(name)
  size, where = 8192, SingleDeviceSharding(slice_.devices[0])
  matrix = jax.ShapeDtypeStruct((size, size), jnp.bfloat16, sharding=where)
  product = Part(jax.jit(jnp.matmul), (matrix, matrix))
  [(program, _)] = aot.compile_all([aot.Job(product, mesh=None)])
  cycles = hlo.Program(program.as_text()).cost().cycles
  assert 0.65 < size**3 / cycles / slice_.chip.multiply_adds < 1


@pytest.mark.tpu
@needs_libtpu
def test_a_reduce_scatter_is_priced_as_compiled():
  """The compiler fuses an all-reduce, padded, and the slice that is kept."""
  slice_, size = aot.find_slice('v5e:2x2'), 2048
  mesh = Mesh(np.array(slice_.devices), ('chips',))
  whole, split = PartitionSpec(), PartitionSpec('chips')
  matrix = jax.ShapeDtypeStruct(
    (size, size), jnp.bfloat16, sharding=NamedSharding(mesh, whole)
  )
  scatter = functools.partial(
    jax.lax.psum_scatter, axis_name='chips', tiled=True
  )
  scattered = jax.shard_map(
    scatter, mesh=mesh, in_specs=whole, out_specs=split, check_vma=False
  )
  programs = aot.compile_all(
    [aot.Job(Part(jax.jit(scattered), (matrix,)), mesh)]
  )
  assert 'calls=%all-reduce-scatter' in programs[0][0].as_text()
  [cost] = aot.price(programs, slice_.chip)
  # Three of four shares, and three hops of a microsecond.
  seconds = 3 / 4 * 2 * size**2 / slice_.chip.link_bandwidth + 3e-6
  assert seconds <= cost.collective_seconds < 1.2 * seconds


@pytest.mark.tpu
@needs_libtpu
@pytest.mark.parametrize(
  ('name', 'num_chips'),
  [('v4:1x1x1', 1), ('v4:2x2x1', 4), ('v5e:2x4', 8), ('v6e:1x1', 1)],
)
def test_a_slice_has_a_device_a_chip(name, num_chips):
  assert len(aot.find_slice(name).devices) == num_chips


@pytest.mark.tpu
@needs_libtpu
def test_what_does_not_fit_is_refused_with_the_bytes():
  too_long = task('v4:1x1x1', 't5_1_1_xxl', 't5_1_1_small', batch_size=64)
  with pytest.raises(ValueError, match=r'\d{11} bytes .*34359738368'):
    parts.pair_costs(too_long, max_gamma=4)


@pytest.mark.tpu
@needs_libtpu
def test_a_model_axis_that_does_not_divide_the_heads_is_refused():
  uneven = task('v5e:2x4', 't5_1_1_base', 't5_1_1_small')
  with pytest.raises(ValueError, match=r'axis of 8 .*12'):
    parts.pair_costs(uneven, max_gamma=4)


@pytest.mark.tpu
@needs_libtpu
@pytest.mark.slow
def test_parts_of_a_pair_move_their_weights_once():
  """On four chips; the draft model's six heads do not divide by them."""
  decode = task('v5e:2x2', 't5_1_1_base', 't5_1_1_small')
  pair = parts.pair_costs(decode, max_gamma=2)
  assert pair.costs.widths == (1, 2, 3)
  assert 'whole draft model' in pair.notes[0]
  assert 'heads of 6' in pair.notes[0]
  # The decoder's weights and caches, a quarter of them on each chip; neither
  # the encoder nor the table of embeddings is read.
  target = [pair.programs[f'target, {n} positions'] for n in (1, 2, 3)]
  for cost in target:
    table = 32_128 * 768 * 2 / 4
    assert cost.memory_bytes == pytest.approx(
      cost.argument_bytes - table, rel=0.15
    )
    # Two all-reduces a layer and attention at the least.
    assert cost.num_collectives >= 3 * 12
    assert cost.seconds > cost.memory_seconds + cost.collective_seconds
  further = pair.programs['drafter, further token']
  assert further.num_collectives == 0
  # A tree moves what a chain moves, and what it is drafted with.
  tree = pair.programs['target, tree of 2 nodes']
  assert tree.memory_bytes == pytest.approx(target[-1].memory_bytes, rel=0.1)
  draft = pair.programs['drafter, tree of 2 nodes, 2 deep']
  assert draft.seconds > further.seconds
  assert pair.costs.tree_nodes == [2]
  ratio = pair.costs.verify_cost_ratio(2)
  assert 0.9 < ratio < 1.2
  memory = pair.memory
  assert memory['total'] == sum(
    memory[name]
    for name in ('target_params', 'draft_params', 'caches', 'temporaries')
  )
  assert memory['total'] < memory['available'] == 16 * 2**30
  assert planner.plan(0.7, pair.costs, max_gamma=2).best.gamma in (0, 1, 2)


@pytest.mark.slow
@pytest.mark.parametrize(
  ('drafter', 'num_trees'),
  [
    *(('eagle', 2), ('block', 2), ('model', 2)),
    *(('quantized', 2), ('uniform', 0), ('none', 0)),
  ],
)
def test_parts_of_a_drafter_fit_together(drafter, num_trees):
  """Whatever it reads, and whether it drafts trees; they are not compiled."""
  target, own = toy.llama_config(40, num_layers=8), toy.llama_config(32)
  sizes = {
    'model': own,
    'eagle': presets.eagle('eagle3_4k', target, dtype=jnp.bfloat16),
    'block': presets.block('dflash_b8', target, dtype=jnp.bfloat16),
  }
  options = {}
  if drafter in sizes:
    options['model'] = Model(checkpoint='own', sizes=sizes[drafter])
  decoder = decoder_lib.outline(
    Model(checkpoint='target', sizes=target),
    drafter=DRAFTERS[drafter](**options),
    sampling=TextSettings(temperature=1.0),
    is_dry_run=True,
  )
  check_parts(decoder, num_trees)


def check_parts(decoder, num_trees: int):
  decode = workloads.Workload(
    slice=aot.Slice(name='one', chip=CHIPS['v5e'], devices=jax.devices()[:1]),
    decoder=decoder,
    batch_size=2,
    input_length=9,
    output_length=5,
    num_partitions=1,
  )
  assert len(parts.tree_shapes(decode, 3)) == num_trees
  jobs = parts.part_jobs(
    decode, parts.shapes_of(decode, Fixed(3)), 3, parts.tree_shapes(decode, 3)
  )
  assert len(jobs) == 3 + 2 + 2 * num_trees
  for job in jobs.values():
    outputs = jax.eval_shape(job.part.jitted, *job.part.args)
    # What is donated comes back in the same shapes.
    shapes = lambda tree: sorted(
      (leaf.shape, str(leaf.dtype)) for leaf in jax.tree.leaves(tree)
    )
    found = shapes(outputs)
    assert all(each in found for each in shapes(job.part.args[1]))


@pytest.mark.tpu
@needs_libtpu
@pytest.mark.slow
@pytest.mark.parametrize(
  ('models', 'batch_size'),
  [
    (('v4:2x2x1', 't5_1_1_xxl', 't5_1_1_small'), 1),
    # More rows than are written one by one.
    (('v4:1x1x1', 'lm_mini', 'lm_nano'), 16),
  ],
)
def test_the_whole_decode_keeps_to_the_chip(models, batch_size):
  """Neither host transfers nor copies of caches in the loop."""
  pair = task(*models, batch_size=batch_size)
  gamma = 3
  whole = parts.shapes_of(pair, Fixed(gamma))
  job = aot.Job(whole.program.whole, pair.mesh)
  [(program, _)] = aot.compile_all([job])
  text = program.as_text()
  for word in ('callback', 'outfeed', 'infeed', ' send(', ' recv(', 'ToHost'):
    assert word not in text, word
  capacity = 1 + pair.output_length + gamma + 1
  # The least of the caches: the draft model's, whole on every chip.
  draft = presets.preset(models[2])
  cache = batch_size * draft.num_heads * capacity * draft.head_dim
  assert copies.in_loops(hlo.Program(text), cache) == []


@pytest.mark.tpu
@needs_libtpu
@pytest.mark.slow
@pytest.mark.parametrize('name', ['t5_1_1_xxl', 'llama_3_1_8b'])
def test_a_v5p_lays_out_no_kernel_anew(name, monkeypatch):
  assert copied_kernels(name) == 0
  # Without the barrier, those of the projections.
  monkeypatch.setattr(jax.lax, 'optimization_barrier', lambda x: x)
  jax.clear_caches()
  assert copied_kernels(name) > 0
  jax.clear_caches()


def copied_kernels(name: str) -> int:
  """Kernels that a call over 13 positions copies, of a model with one layer."""
  config = presets.PRESETS[name]
  sizes = {
    field.name: 1
    for field in dataclasses.fields(config)
    if field.name.endswith('_layers')
  }
  config = dataclasses.replace(config, **sizes, dtype=jnp.bfloat16)
  model = families.language_model(config)
  params = jax.tree.map(
    lambda leaf: jax.ShapeDtypeStruct(leaf.shape, jnp.bfloat16),
    families.param_shapes(config),
  )
  encoder = {'encoder_rows': [[1]], 'encoder_width': 512}
  prompt = toy.prompt([[1]], **encoder if name.startswith('t5') else {})
  init = lambda params, prompt: model.init(params, prompt, 142)
  cache = jax.eval_shape(init, params, prompt)
  tokens = jax.ShapeDtypeStruct((1, 13), jnp.int32)
  [device] = aot.find_slice('v5p:1x1x1').devices
  args = jax.tree.map(
    lambda leaf: jax.ShapeDtypeStruct(
      leaf.shape, leaf.dtype, sharding=SingleDeviceSharding(device)
    ),
    (params, tokens, cache),
  )
  text = jax.jit(model.extend).lower(*args).compile().as_text()
  return sum(
    each.opcode == 'copy' and each.outputs[0].num_elements == 4096**2
    for body in hlo.Program(text).computations.values()
    for each in body.values()
  )
