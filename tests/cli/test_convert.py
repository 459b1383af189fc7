"""`specdec convert`: every format to every other, and nothing lost."""

import json
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest

pytest.importorskip('sentencepiece')

from specdec_jax.checkpoints import (
  formats,
  loading,
  model_file,
  orbax,
  pretrained,
  safetensors_folder,
  stored_arrays,
  t5x,
)
from specdec_jax.models import families, layers
from specdec_jax.models.t5 import T5Config
from tests.cli import tiny
from tests.cli.tiny import assert_refused

CONFIG = T5Config(
  vocab_size=128,
  embed_dim=64,
  num_encoder_layers=2,
  num_decoder_layers=2,
  num_heads=4,
  head_dim=16,
  mlp_dim=128,
)
TOUR = (
  *('orbax', 'safetensors', 'huggingface', 't5x_orbax'),
  *('safetensors', 't5x_legacy', 'huggingface'),
)


@pytest.fixture(scope='module')
def golden(request):
  return request.config.rootpath / 'tests' / 'golden' / 't5x'


@pytest.fixture
def source(golden, tmp_path):
  """What T5X wrote, with sizes and vocabulary beside it."""
  folder = tmp_path / 'source'
  shutil.copytree(golden / 't5x_legacy', folder)
  shutil.copy(golden / 'tiny_sp.model', folder / 'spiece.model')
  (folder / 'tokenizer_config.json').write_text('{"extra_ids": 0}')
  model_file.write(folder, CONFIG)
  return folder


def assert_same_bits(params, expected):
  params, expected = map(stored_arrays.flatten, (params, expected))
  assert set(params) == set(expected)
  for name, leaf in expected.items():
    assert params[name].dtype == leaf.dtype
    np.testing.assert_array_equal(params[name], leaf, name)


@pytest.mark.parametrize('dtype', ['float32', 'bfloat16'])
def test_a_tour_of_all_formats_changes_nothing(run, source, tmp_path, dtype):
  first = loading.load(str(source), dtype=jnp.dtype(dtype).type)
  previous = source
  for to in TOUR:
    folder = tmp_path / f'{to}_of_{previous.name}'
    result = run('convert', previous, folder, '--to', to, '--dtype', dtype)
    assert result.status == 0, result
    size = {'float32': '856,064', 'bfloat16': '428,032'}[dtype]
    assert result.out == (
      f'wrote {folder} ({to}): 52 arrays, 214,016 parameters, {size} bytes in '
      f'{dtype}\n'
    )
    model = loading.load(str(folder), dtype=jnp.dtype(dtype).type)
    # Sizes apart from what is only told beside the weights.
    assert model.config == first.config
    assert_same_bits(model.params, first.params)
    assert model.vocabulary.tokens() == first.vocabulary.tokens()
    previous = folder
  assert first.description == (
    f'source: 0M parameters in {dtype}, 2+2 layers, 128 tokens'
  )


def test_the_step_is_kept_or_chosen(run, source, tmp_path):
  for options, step in (((), 7), (('--step', '12'), 12)):
    folder = tmp_path / f'step_{step}'
    run('convert', source, folder, '--to', 't5x_orbax', *options)
    assert t5x.find(folder).name == f'checkpoint_{step}'
    assert t5x.read_step(folder) == step


def test_a_step_joins_those_that_are_there(run, source, tmp_path):
  folder = tmp_path / 'steps'
  to = lambda step, *how: run(
    *('convert', source, folder, '--step', step, '--to', *how)
  )
  assert to(1, 't5x_legacy').status == 0
  precious = folder / 'checkpoint_1' / 'checkpoint'
  before = precious.read_bytes()
  (folder / 'notes.txt').write_text('years')
  for layout in ('t5x_orbax', 't5x_legacy'):
    added = to(2, layout, *['--overwrite'] * (layout == 't5x_legacy'))
    assert added.status == 0, added
    assert added.out.startswith(f'wrote {folder}/checkpoint_2 ({layout})')
    assert t5x.layout_of(folder / 'checkpoint_2') == layout[4:]
  assert_refused(to(2, 't5x_legacy'), f'{folder}/checkpoint_2 already exists')
  assert precious.read_bytes() == before
  steps = {1, 2}
  assert {p.name for p in folder.glob('check*')} == {
    f'checkpoint_{step}' for step in steps
  }
  assert (folder / 'notes.txt').read_text() == 'years'
  expected = loading.load(str(source))
  assert_same_bits(loading.load(str(folder)).params, expected.params)

  # What steps share stays as it is, or the step is of another model.
  other = ('convert', source, folder, '--to', 'orbax', '--overwrite')
  assert_refused(run(*other), 'holds checkpoint_1, checkpoint_2, which')
  sizes = json.loads((folder / model_file.NAME).read_text())
  sizes['config']['mlp_dim'] += 1
  (folder / model_file.NAME).write_text(json.dumps(sizes))
  assert_refused(to(3, 't5x_legacy'), 'another network')
  (folder / model_file.NAME).unlink()
  draft = folder / formats.DRAFT_VOCABULARY
  draft.write_text('{"ids": [1]}')
  assert_refused(to(3, 't5x_legacy'), 'another draft vocabulary')
  draft.unlink()
  assert not (folder / 'checkpoint_3').exists()
  assert to(3, 't5x_legacy', '--dtype', 'bfloat16').status == 0
  assert model_file.read(folder).mlp_dim == sizes['config']['mlp_dim'] - 1


def test_only_t5x_needs_a_step(run, golden, tmp_path):
  folder = shutil.copytree(golden / 't5x_orbax', tmp_path / 'source')
  model_file.write(folder, CONFIG)
  path = folder / 'checkpoint_7' / 'state' / '_METADATA'
  stated = json.loads(path.read_text())
  step = stated['tree_metadata']["('state', 'step')"]['value_metadata']
  step['skip_deserialize'] = True
  path.write_text(json.dumps(stated))
  to = lambda *how: run('convert', folder, tmp_path / how[0], '--to', *how)
  assert to('safetensors').status == 0
  assert_refused(to('t5x_legacy'), 'does not say how many steps')
  assert to('t5x_legacy', '--step', '0').status == 0
  assert t5x.read_step(tmp_path / 't5x_legacy') == 0


def test_a_draft_vocabulary_goes_along(run, tmp_path):
  folder, name = tmp_path / 'nano', formats.DRAFT_VOCABULARY
  own = (pretrained.FOLDER / 'ende-nano' / name).read_bytes()
  for more in (['orbax'], ['safetensors', '--overwrite']):
    assert run('convert', 'ende-nano', folder, '--to', *more).status == 0
    assert (folder / name).read_bytes() == own


def test_sizes_and_vocabulary_can_be_given(run, golden, tmp_path):
  bare, folder = golden / 't5x_orbax', tmp_path / 'new'
  model_file.write(tmp_path, CONFIG)
  config = ('--to', 'orbax', '--config', tmp_path / 'model.json')
  result = run('convert', bare, folder, *config)
  assert result.status == 0
  assert result.out.endswith('in float32, without a vocabulary\n')
  words = ('--vocabulary', golden / 'tiny_sp.model')
  result = run('convert', bare, tmp_path / 'a', *config, *words)
  assert result.status == 0, result
  assert loading.load(str(tmp_path / 'a')).vocabulary.vocab_size == 85
  result = run('convert', tmp_path / 'a', tmp_path / 'b', *config)
  assert_refused(result, 'states its sizes')


REFUSED = {
  'no sizes': ('{bare}', 'state its sizes'),
  'unknown sizes': ('{bare} --config t5_1_1_tiny', "'t5_1_1_tiny' is neither"),
  'other sizes': ('{bare} --config t5_1_1_small', 'lacks 138 arrays'),
  'too many sentinels': (
    '{bare} --config {sizes} --vocabulary {words} --extra_ids 100',
    *('185 tokens', '128'),
  ),
  'sentinels of no vocabulary': (
    '{bare} --config {sizes} --extra_ids 100',
    *('--extra_ids', '--vocabulary'),
  ),
  'step of Orbax': ('{source} --step 1', '--step', 'T5X'),
  'no folder': ('{folder}/none', 'no model'),
  'empty folder': ('{folder}/empty', 'config.json', 'checkpoint_N'),
  'unfinished checkpoint': ('{unfinished}', 'no finished checkpoint_N'),
}


@pytest.mark.parametrize('case', REFUSED)
def test_sources_that_are_refused(run, golden, source, tmp_path, case):
  flags, *parts = REFUSED[case]
  (tmp_path / 'empty').mkdir()
  unfinished = shutil.copytree(source, tmp_path / 'unfinished')
  (unfinished / 'checkpoint_7' / 'checkpoint').unlink()
  flags = flags.format(
    bare=golden / 't5x_orbax',
    source=source,
    sizes=source / model_file.NAME,
    words=source / 'spiece.model',
    folder=tmp_path,
    unfinished=unfinished,
  )
  new = tmp_path / 'new'
  assert_refused(
    run('convert', *flags.split(), str(new), '--to', 'orbax'), *parts
  )
  assert not new.exists()


def test_a_folder_without_a_vocabulary_is_not_loaded_for_decoding(tmp_path):
  orbax.save(tmp_path / 'new', CONFIG, loading_params())
  with pytest.raises(ValueError, match='no vocabulary'):
    loading.load(str(tmp_path / 'new'))


def loading_params():
  rng = np.random.default_rng(0)
  return jax.tree.map(
    lambda leaf: rng.standard_normal(leaf.shape).astype(np.float32),
    families.param_shapes(CONFIG),
  )


def test_llamas_are_converted_except_to_t5x(run, model, tmp_path):
  first = loading.load(model)
  for to in ('orbax', 'safetensors', 'huggingface'):
    folder = tmp_path / to
    assert run('convert', model, folder, '--to', to).status == 0
    loaded = loading.load(str(folder))
    assert loaded.config == first.config
    assert_same_bits(loaded.params, first.params)
    vocabulary = loaded.vocabulary
    assert vocabulary.tokens() == first.vocabulary.tokens()
    assert vocabulary.eos_ids == first.vocabulary.eos_ids
    assert vocabulary.chat_template == first.vocabulary.chat_template
  packed = ('--to', 'orbax', '--weights', 'int4:8')
  told = run('convert', model, tmp_path / 'packed', *packed).out
  assert f' {layers.num_params(first.params):,} parameters' in told
  assert told.endswith('bytes in int4:8\n')
  # It stays packed.
  copy = ('--to', 'safetensors')
  told = run('convert', tmp_path / 'packed', tmp_path / 'copy', *copy).out
  assert told.endswith('bytes in int4:8\n')
  result = run('convert', model, tmp_path / 't5x', '--to', 't5x_legacy')
  assert_refused(result, 'T5s alone')
  assert not (tmp_path / 't5x').exists()


def test_nothing_is_replaced_unasked(run, source, tmp_path):
  folder = tmp_path / 'new'
  to = ('--to', 'huggingface')
  assert run('convert', source, folder, *to).status == 0
  (folder / 'config.json').write_text('mine')
  assert_refused(run('convert', source, folder, *to), '--overwrite replaces it')
  assert (folder / 'config.json').read_text() == 'mine'
  assert run('convert', source, folder, *to, '--overwrite').status == 0
  assert json.loads((folder / 'config.json').read_text())['d_model'] == 64
  assert sorted(p.name for p in tmp_path.iterdir()) == ['new', 'source']


@pytest.mark.parametrize('place', ['', '..', 'checkpoint_7', 'new', '../x/y'])
def test_places_where_nothing_is_written(run, source, place):
  names = sorted(str(p) for p in source.parent.rglob('*'))
  result = run(
    'convert', source, source / place, '--to', 'orbax', '--overwrite'
  )
  assert_refused(result, 'cannot write')
  assert sorted(str(p) for p in source.parent.rglob('*')) == names


def test_other_folders_are_never_replaced(run, source, tmp_path):
  precious = tmp_path / 'precious'
  precious.mkdir()
  (precious / 'thesis.tex').write_text('years')
  file = tmp_path / 'file'
  file.write_text('years')
  for path in (precious, file):
    result = run('convert', source, path, '--to', 'orbax', '--overwrite')
    assert_refused(result, 'holds no model', '--overwrite')
  assert (precious / 'thesis.tex').read_text() == file.read_text() == 'years'


def test_a_model_is_not_replaced_with_what_lies_beside_it(
  run, source, tmp_path
):
  """Such as a run's checkpoints, or another project that has a config.json."""
  for to in ('huggingface', 'orbax'):
    folder = tmp_path / to
    again = ('convert', source, folder, '--to', to, '--overwrite')
    assert run(*again[:-1]).status == 0
    assert run(*again).status == 0
    (folder / 'results').mkdir()
    (folder / 'results' / 'thesis.tex').write_text('years')
    (folder / 'notes.txt').write_text('years')
    result = run(*again)
    assert_refused(result, f'{folder} holds notes.txt')
    assert (folder / 'results' / 'thesis.tex').read_text() == 'years'


@pytest.mark.parametrize('to', ['t5x_legacy', 'safetensors', 'huggingface'])
def test_a_full_disk_is_called_one(run, source, tmp_path, to):
  with tiny.files_of_at_most(20_000):
    result = run('convert', source, tmp_path / 'new', '--to', to)
  assert result.err == f'specdec: error: {tmp_path / "new"}: File too large\n'
  assert (result.status, result.out) == (2, '')
  assert sorted(p.name for p in tmp_path.iterdir()) == ['source']


def test_orbax_does_not_begin_what_cannot_fit(tmp_path):
  too_much = {'kernel': np.broadcast_to(np.float32(0), (2**50,))}
  with pytest.raises(OSError, match='No space left') as error:
    orbax.write_tree(tmp_path / 'params', too_much)
  assert error.value.filename == str(tmp_path / 'params')
  assert '4,503,599,627,370,496 bytes' in error.value.strerror
  assert not (tmp_path / 'params').exists()


def test_an_interrupt_leaves_what_was_there(run, source, tmp_path, monkeypatch):
  folder = tmp_path / 'new'
  to = ('--to', 'huggingface')
  run('convert', source, folder, *to)
  before = {p.name: p.read_bytes() for p in folder.iterdir()}

  def interrupt(folder, params, parameters):
    (folder / 'begun').write_text('')
    raise KeyboardInterrupt

  monkeypatch.setattr(safetensors_folder, 'write_params', interrupt)
  assert run('convert', source, folder, *to, '--overwrite').status == 130
  assert {p.name: p.read_bytes() for p in folder.iterdir()} == before
  assert sorted(p.name for p in tmp_path.iterdir()) == ['new', 'source']
