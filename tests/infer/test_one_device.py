"""A mesh of one device is one device: `infer` multiplies as `generate` does."""

import collections
import functools
import json
import re

import jax
import numpy as np
import pytest

import specdec_jax
from specdec_jax.assembly import decode_many, models
from specdec_jax.assembly.drafters import DraftModel
from specdec_jax.assembly.models import Model
from specdec_jax.infer import chunks, infer
from specdec_jax.infer.decoding import Decoding, outline
from specdec_jax.models import quantized
from specdec_jax.sharding import mesh as mesh_lib
from specdec_jax.sharding import rules
from specdec_jax.text import tasks
from tests import slow
from tests.cli import tiny
from tests.decoding.test_compilation import computations

# Kernels wide enough for tiles.
SIZES = {
  'embed_dim': 64,
  'num_layers': 2,
  'num_heads': 4,
  'head_dim': 16,
  'mlp_dim': 128,
  'max_positions': 256,
}
DTYPES = ['float32', 'bfloat16']
TEXT = 'the other'
# Lengths that need no padding in `generate`.
LENGTHS = {'inputs': 64, 'targets': 128}


@pytest.fixture(scope='module')
def checkpoint(tmp_path_factory):
  folder = tmp_path_factory.mktemp('model')
  return tiny.write_model(folder / 'tiny', **SIZES)


def programs_of_infer(
  folder, checkpoint, monkeypatch, *, dtype, batch_size
) -> list[str]:
  """The compiled prefill and the compiled loop, after a decode."""
  compiled = []
  warm_up = decode_many.warm_up

  def warm_up_and_keep(programs, params, prompt):
    compiled.append((params, programs, prompt))
    warm_up(programs, params, prompt)

  monkeypatch.setattr(decode_many, 'warm_up', warm_up_and_keep)
  task = folder / 'task.jsonl'
  lines = [json.dumps({'inputs': TEXT})] * batch_size
  task.write_text('\n'.join(lines) + '\n')
  infer.infer(
    model=Model(checkpoint=checkpoint, dtype=dtype),
    output_dir=str(folder / 'out'),
    task_feature_lengths=LENGTHS,
    find_task=functools.partial(tasks.find, str(task)),
    decoding=Decoding(batch_size=batch_size, refill_size=batch_size),
    make_mesh=functools.partial(mesh_lib.device_mesh, num_devices=1),
  )
  ((params, programs, prompt),) = compiled
  seed, num_done = np.uint32(0), np.int32(1)
  with jax.set_mesh(mesh_lib.device_mesh(num_devices=1)):
    fresh = programs.init(params, seed, prompt)
    prefill = programs.init.lower(params, seed, prompt)
    loop = programs.run.lower(params, programs.idle(fresh), num_done)
    return [lowered.compile().as_text() for lowered in (prefill, loop)]


def programs_of_generate(checkpoint, *, dtype, batch_size) -> list[str]:
  """The compiled prefill and the compiled loop."""
  decoder = specdec_jax.load(checkpoint, drafter='none', dtype=dtype)
  texts = [TEXT] * batch_size
  settings = {'max_new_tokens': LENGTHS['targets'], 'batch_size': batch_size}
  list(specdec_jax.generate(decoder, texts, **settings))
  ((prefill, loop, _),) = decoder.programs.values()
  return [prefill.as_text(), loop.as_text()]


def products(hlo: str) -> collections.Counter:
  """Products of a compiled program: the operation, its result and its operands
  with their dtypes, shapes and layouts, and what it contracts."""
  counts = collections.Counter()
  for instructions in computations(hlo).values():
    types = {}
    for line in instructions:
      match = re.match(
        r'\s*(?:ROOT )?%([\w.\-]+) = (\S+) ([\w\-]+)\((.*)', line
      )
      if match is None:
        continue
      name, result, operation, rest = match.groups()
      types[name] = result
      is_library = 'custom_call_target="__onednn' in rest
      if operation not in ('dot', 'convolution') and not is_library:
        continue
      operands, attributes = rest.split(')', 1)
      operands = re.findall(r'%([\w.\-]+)', operands)
      axes = re.findall(
        r'(?:contracting_dims|batch_dims)=\{[\d,]*\}', attributes
      )
      product = operation, result, *(types[x] for x in operands), *axes
      counts[product] += 1
  return counts


@slow.parametrize(
  ('dtype', 'batch_size'),
  [(dtype, batch_size) for dtype in DTYPES for batch_size in (1, 4)],
  now=[('bfloat16', 1), ('float32', 4)],
)
@pytest.mark.optimized
def test_infer_and_generate_compile_the_same_products(
  tmp_path, checkpoint, monkeypatch, dtype, batch_size
):
  sizes = {'dtype': dtype, 'batch_size': batch_size}
  of_infer = programs_of_infer(tmp_path, checkpoint, monkeypatch, **sizes)
  of_generate = programs_of_generate(checkpoint, **sizes)
  for by_infer, by_generate in zip(of_infer, of_generate, strict=True):
    # Each of the two layers has at least two products of attention, of its
    # projections and of the feed-forward. The prefill ends with the keys and
    # values of the last.
    assert products(by_generate).total() >= 6
    assert products(by_infer) == products(by_generate)


def copies(params) -> set[str]:
  """Paths of the copies that only a CPU multiplies by."""
  paths = {
    jax.tree_util.keystr(path, simple=True, separator='/')
    for path, _ in jax.tree.leaves_with_path(params)
  }
  is_copy = lambda path: path.rpartition('/')[2].startswith(quantized.COPIES)
  return set(filter(is_copy, paths))


def params_of_infer(model, choice):
  """The weights of a job of one device."""
  mesh = mesh_lib.device_mesh(num_devices=1)
  decoding = Decoding(make_drafter=lambda: choice)
  with jax.set_mesh(mesh):
    job = outline(model, decoding, LENGTHS, 'predict', mesh)
    return chunks.load(job).params


@pytest.mark.parametrize('dtype', DTYPES)
def test_target_and_draft_model_have_the_copies(tmp_path, checkpoint, dtype):
  draft = tiny.write_model(tmp_path / 'draft', change=tiny.weaker, **SIZES)
  choice = DraftModel(model=Model(checkpoint=draft, dtype=dtype), gamma=2)
  params = params_of_infer(Model(checkpoint=checkpoint, dtype=dtype), choice)
  decoder = specdec_jax.load(checkpoint, drafter=choice, dtype=dtype)
  for by_infer, by_load in zip(params, decoder.params, strict=True):
    assert copies(by_load)
    jax.tree.map(np.testing.assert_array_equal, by_infer, by_load)


def test_a_model_that_drafts_for_itself_is_read_once(checkpoint):
  model = Model(checkpoint=checkpoint)
  params = params_of_infer(model, DraftModel(model=model, gamma=2))
  sides = map(jax.tree.leaves, params)
  assert all(target is own for target, own in zip(*sides, strict=True))


@pytest.mark.parametrize('name', ['read', 'random', 'packed'])
@pytest.mark.parametrize('num_devices', [1, 2])
def test_only_one_device_has_the_copies(checkpoint, name, num_devices):
  model = {
    'read': Model(checkpoint=checkpoint, dtype='bfloat16'),
    'random': Model(checkpoint='random:lm_nano', dtype='bfloat16'),
    'packed': Model(checkpoint=checkpoint, weights='int8'),
  }[name]
  config = models.read_config(model)
  mesh = mesh_lib.device_mesh(num_devices=num_devices)
  shardings = functools.partial(mesh_lib.parameter_shardings, mesh)
  params = models.read_params(model, config, shardings)
  devices = {*mesh.devices.flat}
  assert all(leaf.devices() == devices for leaf in jax.tree.leaves(params))
  on_default_device = models.read_params(model, config)
  if num_devices == 1:
    jax.tree.map(np.testing.assert_array_equal, params, on_default_device)
  else:
    assert copies(on_default_device) or name == 'packed'
    assert not copies(params)


def test_nothing_is_constrained_on_one_device():
  mesh = mesh_lib.device_mesh(num_devices=1)
  with jax.set_mesh(mesh):
    program = jax.make_jaxpr(lambda x: rules.constrain(x, 'batch'))(np.ones(2))
  assert not program.eqns
