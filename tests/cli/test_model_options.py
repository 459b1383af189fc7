"""Which models, and what is told of them beside their folders."""

import json
import pathlib
import shutil

import pytest

pytest.importorskip('sentencepiece')

from specdec_jax.checkpoints import model_file
from tests.cli.commands import DECODING_COMMANDS
from tests.cli.test_convert import CONFIG
from tests.cli.tiny import assert_refused

GOLDEN = pathlib.Path(__file__).parents[1] / 'golden' / 't5x'


@pytest.fixture
def bare(tmp_path):
  """A T5X checkpoint as T5X writes it; sizes and vocabulary lie elsewhere."""
  shutil.copytree(GOLDEN / 't5x_legacy', tmp_path / 'bare')
  shutil.copy(GOLDEN / 'tiny_sp.model', tmp_path / 'words.model')
  model_file.write(tmp_path, CONFIG)
  return tmp_path / 'bare'


@pytest.fixture
def beside(bare):
  """What names them."""
  return (
    *('--config', str(bare.parent / 'model.json')),
    *('--vocabulary', str(bare.parent / 'words.model')),
  )


@pytest.mark.slow
def test_sizes_and_vocabulary_of_a_bare_checkpoint(run, bare, beside):
  usual = ('--max_new_tokens', '6', '--prompt', 'the cat', '--json', '-')
  call = lambda *given: run('generate', '--model', bare, *usual, *given)
  assert_refused(call(), 'state its sizes', '--config')
  assert_refused(call(*beside[:2]), 'has no vocabulary', '--vocabulary')
  told = call(*beside)
  assert (told.status, told.err) == (0, ''), told
  draft = ('--draft_model', bare, '--draft_config', beside[1], '--gamma', '2')
  drafted = call(*beside, *draft)
  # The same, from a folder that has both.
  model_file.write(bare, CONFIG)
  shutil.copy(beside[3], bare / 'spiece.model')
  [expected] = call().records()
  assert told.records()[0]['text'] == expected['text']
  assert told.records()[0]['tokens'] == expected['tokens']
  assert drafted.records()[0]['tokens'] == expected['tokens']
  assert drafted.records()[0]['statistics']['alpha'] == 1


@pytest.mark.parametrize('command', DECODING_COMMANDS)
def test_commands_that_decode_have_the_flags(run, command):
  out = run(command, '--help').out
  for flag in ('config', 'vocabulary', 'revision', 'draft_config', 'system'):
    assert f'--{flag} ' in out


def test_random_weights_have_sizes_of_their_own(run):
  model = ('--model', 'random:t5_1_1_small', '--config', 't5_1_1_small')
  result = run('generate', *model, '--prompt', 'a')
  assert_refused(result, 'random:t5_1_1_small', 'its own')


def test_a_revision_of_a_repository(
  run, model, make_model, monkeypatch, tmp_path
):
  """From the cache of huggingface_hub, which needs no network for it."""
  constants = pytest.importorskip('huggingface_hub.constants')
  monkeypatch.setattr(constants, 'HF_HUB_OFFLINE', True)
  monkeypatch.setattr(constants, 'HF_HUB_CACHE', str(tmp_path))
  repository = tmp_path / 'models--some--one'
  (repository / 'refs').mkdir(parents=True)
  folders = {'main': model, 'v2': make_model('second', seed=1)}
  for i, (revision, folder) in enumerate(folders.items()):
    (repository / 'refs' / revision).write_text(str(i) * 40)
    shutil.copytree(folder, repository / 'snapshots' / (str(i) * 40))

  def texts(*given):
    result = run('generate', *given, '--prompt', 'ab', '--max_new_tokens', '6',
                 '--json', '-')  # fmt: skip
    return [r['tokens'] for r in result.records()] or result.err

  expected = {name: texts('--model', path) for name, path in folders.items()}
  assert expected['main'] != expected['v2']
  assert texts('--model', 'hf:some/one') == expected['main']
  assert texts('--model', 'hf:some/one', '--revision', 'v2') == expected['v2']
  assert texts('--model', 'hf:some/one@v2') == expected['v2']
  assert 'hf:some/one@v3' in texts('--model', 'hf:some/one@v3')
  result = run('generate', '--model', 'hf:some/one@', '--prompt', 'ab')
  assert_refused(result, 'or hf:organisation/name@revision')


@pytest.mark.parametrize(
  ('name', 'stated', 'said'),
  [
    (
      'generation_config.json',
      {'penalty_alpha': 0.6, 'watermarking_config': [*range(99)]},
      'penalty_alpha 0.6, watermarking_config [0, 1, 2, 3, 4, 5, ...]: ',
    ),
    ('config.json', {'guidance_scale': 3}, 'guidance_scale 3: '),
    ('generation_config.json', {'top_k': 1, 'top_p': 0.5}, 'top_k 1: '),
    ('generation_config.json', {'repetition_penalty': 1.0, 'top_k': 5}, None),
  ],
)
def test_what_is_not_honoured_is_named_once(
  run, make_model, name, stated, said
):
  model = make_model(f'with_{next(iter(stated))}')
  path = pathlib.Path(model, name)
  before = json.loads(path.read_text()) if path.exists() else {}
  path.write_text(json.dumps(before | stated))
  told = run('generate', '--model', model, '--max_new_tokens=2', '--prompt=ab')
  assert told.status == 0
  if said is None:
    assert told.err == ''
  else:
    assert told.err.startswith(f'specdec: {path} has {said}')
    assert told.err.count('\n') == 1


def test_what_a_model_states_counts_where_nothing_is_said(run, make_model):
  model, usual = make_model('states'), ('--max_new_tokens=6', '--prompt=the in')
  stated = {
    **{'repetition_penalty': 3.0, 'suppress_tokens': [5]},
    **{'sequence_bias': [[[6], 5.0]], 'forced_eos_token_id': 7},
  }

  def text(*flags):
    told = run('generate', '--model', model, *usual, *flags)
    return told.out or told.err

  flags = [x for name, value in stated.items() for x in (f'--{name}', value)]
  said = text(*flags)
  nothing = text()
  path = pathlib.Path(model, 'generation_config.json')
  path.write_text(json.dumps(stated))
  assert text() == said != nothing
  neutral = {'repetition_penalty': 1} | {n: [] for n in [*stated][1:]}
  flags = [x for name, value in neutral.items() for x in (f'--{name}', value)]
  assert text(*flags) == nothing
  path.write_text('{"repetition_penalty": -3}')
  assert f'{path}: repetition_penalty' in text()


def test_what_a_conversion_drops_is_named(run, make_model, tmp_path):
  model = make_model('to_convert')
  pathlib.Path(model, 'generation_config.json').write_text('{"min_length": 3}')
  told = run('convert', model, tmp_path / 'out', '--to', 'safetensors')
  assert (told.status, told.err.count('min_length 3')) == (0, 1)
