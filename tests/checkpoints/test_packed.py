"""Packed weights on disks: integers and scales as they are."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.checkpoints import tiny_models, tiny_t5

pytest.importorskip('orbax.checkpoint')
pytest.importorskip('safetensors')

import specdec_jax
from specdec_jax.assembly import models
from specdec_jax.assembly.models import Model
from specdec_jax.checkpoints import formats, loading, model_file
from specdec_jax.models import products, quantized
from tests.cli import tiny

CONFIGS = {
  'llama': tiny_models.make_config(),
  't5': tiny_t5.make_config(),
}
BY_NAME = {each.name: each for each in formats.FORMATS}
WRITTEN = ('orbax', 'safetensors')


def packed_of(name: str, weights: str):
  params = tiny_models.make_params(CONFIGS[name])
  return quantized.packed(params, quantized.bits_of(weights))


def assert_same(actual, expected):
  def same(a, b):
    assert a.dtype == b.dtype
    np.testing.assert_array_equal(a, b)

  jax.tree.map(same, actual, expected)


@pytest.mark.slow
@pytest.mark.parametrize('to', WRITTEN)
@pytest.mark.parametrize(
  ('name', 'weights'),
  [(n, w) for n in CONFIGS for w in ('int8', 'int4', 'int4:8', 'int3')],
)
def test_what_is_read_is_what_was_written(tmp_path, to, name, weights):
  """In another dtype, too, and as shapes before anything is read."""
  config, params = CONFIGS[name], packed_of(name, weights)
  BY_NAME[to].write(tmp_path / 'model', config, params, 0)
  assert model_file.read_weights(tmp_path / 'model') == weights
  assert model_file.read(tmp_path / 'model') == config
  assert_same(formats.read_params(tmp_path / 'model', config), params)
  model = Model(checkpoint=str(tmp_path / 'model'), dtype='bfloat16')
  half = models.read_config(model)
  [device] = jax.devices()[:1]
  place = jax.sharding.SingleDeviceSharding(device)
  on_one = lambda tree: jax.tree.map(lambda _: place, tree)
  found = models.read_params(model, half, on_one)
  shapes = models.param_shapes(model, half)

  def halved(path, leaf):
    is_scale = path[-1].key.endswith(quantized.SCALE)
    is_kept = is_scale or quantized.is_packed(leaf)
    return leaf if is_kept else leaf.astype(jnp.bfloat16)

  # Weights on a single device get copies that its products read.
  expected = products.with_cpu_copies(
    jax.tree.map_with_path(halved, params), is_tied=config.is_tied
  )
  assert_same(found, expected)
  is_few = quantized.bits_of(weights).bits <= 4
  kinds = {leaf.dtype.name for leaf in jax.tree.leaves(shapes)}
  assert kinds == {'int4' if is_few else 'int8', 'float32', 'bfloat16'}


@pytest.mark.parametrize(
  ('to', 'weights'),
  [('orbax', 'int8'), ('huggingface', 'int8'), ('huggingface', None)],
)
def test_whole_arrays_stay_on_the_host(tmp_path, monkeypatch, to, weights):
  """What is packed or divided later may exceed the device it goes to."""
  config, params = CONFIGS['llama'], tiny_models.make_params(CONFIGS['llama'])
  BY_NAME[to].write(tmp_path, config, params, 0)
  accelerator, host = jax.devices()[:2]
  monkeypatch.setattr(jax, 'local_devices', lambda backend: [host])

  def places(tree):
    assert {leaf.device for leaf in jax.tree.leaves(tree)} == {host}
    place = jax.sharding.SingleDeviceSharding(accelerator)
    return jax.tree.map(lambda _: place, tree)

  model = Model(checkpoint=str(tmp_path), weights=weights)
  found = models.read_params(model, config, places)
  assert {leaf.device for leaf in jax.tree.leaves(found)} == {accelerator}


@pytest.mark.parametrize('to', WRITTEN)
@pytest.mark.parametrize('weights', ['int8', 'int4'])
def test_files_are_as_small_as_the_weights(tmp_path, to, weights):
  config = tiny_models.make_config(embed_dim=256, mlp_dim=1024)
  params = quantized.packed(
    tiny_models.make_params(config), quantized.bits_of(weights)
  )
  BY_NAME[to].write(tmp_path / 'model', config, params, 0)
  files = [x for x in (tmp_path / 'model').rglob('*') if x.is_file()]
  size = sum(x.stat().st_size for x in files)
  least = sum(leaf.nbytes for leaf in jax.tree.leaves(params))
  # Orbax's zarr compresses 4 bits that take a byte.
  most = 0.75 if (to, weights) == ('orbax', 'int4') else 1.03
  assert 0.4 * least < size < most * least


@pytest.mark.parametrize('to', ['huggingface', 't5x_legacy', 't5x_orbax'])
def test_others_have_no_place_for_scales(tmp_path, to):
  name = 'llama' if to == 'huggingface' else 't5'
  with pytest.raises(
    ValueError, match=r'quantized.*write orbax or safetensors'
  ):
    BY_NAME[to].write(tmp_path, CONFIGS[name], packed_of(name, 'int8'), 0)


@pytest.mark.parametrize(
  ('weights', 'message'),
  [
    (None, r'unexpected .*scale'),
    ('int8:16', r'scale is .* expected'),
    ('int9', r'model\.json: .*none of int8'),
  ],
)
def test_other_weights_than_stated_are_refused(tmp_path, weights, message):
  config, params = CONFIGS['llama'], packed_of('llama', 'int8')
  BY_NAME['safetensors'].write(tmp_path / 'model', config, params, 0)
  model_file.write(tmp_path / 'model', config, weights)
  with pytest.raises(ValueError, match=message):
    formats.read_params(tmp_path / 'model', config)


def test_a_misspelt_key_is_refused(tmp_path):
  model_file.write(tmp_path, CONFIGS['llama'], 'int9')
  path = tmp_path / model_file.NAME
  path.write_text(path.read_text().replace('"weights"', '"wieghts"'))
  with pytest.raises(ValueError, match=r"wieghts is 'int9'.*alone"):
    model_file.read(tmp_path)


def test_what_trains_needs_whole_weights(tmp_path):
  config, params = CONFIGS['llama'], packed_of('llama', 'int8')
  BY_NAME['safetensors'].write(tmp_path / 'model', config, params, 0)
  with pytest.raises(
    ValueError, match='quantized to int8: pass the unquantized'
  ):
    loading.read(tmp_path / 'model')


TEXTS = ['the ab in', 'he the']


@pytest.mark.parametrize('to', WRITTEN)
def test_convert_packs_and_load_reads_it_so(tmp_path, capfd, to):
  """As a target, packed as it lies or further, and as a draft model."""
  whole = tiny.write_model(tmp_path / 'whole')
  packed, again = str(tmp_path / 'packed'), str(tmp_path / 'again')
  convert = ('convert', whole, packed, '--to', to, '--weights', 'int8')
  assert tiny.run(capfd, *convert).status == 0
  asked = specdec_jax.load(whole, drafter='none', weights='int8')
  found = specdec_jax.load(packed, drafter='model', draft_model=packed, gamma=2)
  assert_same(found.params.target, asked.params.target)
  texts = [
    [each.text for each in specdec_jax.generate(one, TEXTS, max_new_tokens=9)]
    for one in (asked, found)
  ]
  assert texts[0] == texts[1]
  further = specdec_jax.load(packed, drafter='none', weights='int4')
  assert_same(
    further.params.target,
    quantized.packed(found.params.target, quantized.Bits(4)),
  )
  # What is packed stays so, and goes into no other format.
  other = next(each for each in WRITTEN if each != to)
  assert tiny.run(capfd, 'convert', packed, again, '--to', other).status == 0
  config = formats.read_config(loading.locate(again))
  assert_same(
    *(formats.read_params(loading.locate(x), config) for x in (again, packed))
  )
  refused = tiny.run(
    capfd, 'convert', packed, again + 'x', '--to', 'huggingface'
  )
  assert refused.status != 0
  assert 'write orbax or safetensors' in refused.err
