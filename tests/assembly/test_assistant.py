"""A Gemma 4 and its assistant, from their folders: what is asked for holds."""

import functools
import shutil
from pathlib import Path

import pytest

pytest.importorskip('safetensors')
pytest.importorskip('tokenizers')
pytest.importorskip('jinja2')

import specdec_jax
from specdec_jax.assembly import drafters
from specdec_jax.checkpoints import huggingface
from specdec_jax.models import presets
from tests import slow, toy_assistant, toy_gemma
from tests.cli import tiny

V = len(tiny.make_tokens())
TEXTS = ['the in ab', 'ab', 'in the the ab ab', 'the ab ab ab', 'in']
NUM_NEW = 12


@pytest.fixture(scope='module')
def folders(tmp_path_factory) -> tuple[str, str]:
  """Of a target with embeddings for each layer, and of its assistant, which has
  a head of clusters and no vocabulary."""
  path = tmp_path_factory.mktemp('gemma4')
  words = Path(tiny.write_model(path / 'words'))
  target = toy_gemma.gemma_4_e2b(V, max_positions=512)
  huggingface.save(path / 'target', target, toy_gemma.params(target, seed=1))
  for name in ('tokenizer.json', 'tokenizer_config.json'):
    shutil.copy(words / name, path / 'target')
  own = toy_assistant.config(target, num_clusters=8, num_chosen_clusters=3)
  huggingface.save(path / 'own', own, toy_assistant.params(own, seed=2))
  return str(path / 'target'), str(path / 'own')


def generate(decoder, **options):
  settings = {'max_new_tokens': NUM_NEW, 'batch_size': 3} | options
  return [
    found.tokens for found in specdec_jax.generate(decoder, TEXTS, **settings)
  ]


@pytest.fixture(scope='module')
def plain(folders):
  target, _ = folders
  return generate(specdec_jax.load(target, drafter='none'))


@slow.parametrize(
  'options',
  [
    {'gamma': 3},
    {'gamma': 3, 'lookup': True},
    {'gamma': 3, 'min_prob': 0.3},
    {'tree': 5},
    {'gamma': 2, 'exact_bits': True},
  ],
  ids=lambda options: ', '.join(options),
  now=[{'gamma': 3}],
)
def test_greedy_texts_are_plain_ones(folders, plain, options):
  """Rows are refilled: five texts, three at a time."""
  target, own = folders
  decoder = specdec_jax.load(target, draft_model=own, **options)
  assert isinstance(decoder.recipe.drafter, drafters.Assistant)
  assert generate(decoder) == plain


@pytest.mark.slow
@pytest.mark.parametrize(
  'options',
  [
    {'cache_dtype': 'int8'},
    {'weights': 'int8'},
    {'weights': 'int4'},
    {'repetition_penalty': 1.5, 'no_repeat_ngram_size': 2},
    {'regex': '[a-z ]{3,9}'},
  ],
  ids=lambda options: ', '.join(options),
)
def test_other_options_hold_with_an_assistant(folders, options):
  target, own = folders
  load = functools.partial(specdec_jax.load, target, exact_bits=True, **options)
  expected = generate(load(drafter='none', gamma=3))
  assert generate(load(draft_model=own, gamma=3)) == expected


@pytest.mark.slow
def test_greedy_rows_among_sampled_ones_are_plain(folders, plain):
  """Temperatures of each row; drafts are drawn at the row's own."""
  target, own = folders
  decoder = specdec_jax.load(target, draft_model=own, gamma=3)
  texts = generate(decoder, temperature=[0, 1.5, 0, 0.7, 0], seed=1)
  assert texts[::2] == plain[::2]
  assert texts[1] != plain[1]
  assert texts[3] != plain[3]


@pytest.mark.slow
def test_a_conversation_is_one_long_prompt(folders):
  target, own = folders
  decoder = specdec_jax.load(target, draft_model=own, gamma=3)
  chat = specdec_jax.Conversation(decoder, max_new_tokens=8)
  for text in TEXTS:
    asked = [*chat.messages, {'role': 'user', 'content': text}]
    answer = chat.send(text)
    [whole] = specdec_jax.generate(decoder, [asked], max_new_tokens=8)
    assert answer.tokens == whole.tokens


def test_an_assistant_is_no_model_and_no_eagle(folders):
  target, own = folders
  with pytest.raises(ValueError, match='drafter assistant'):
    specdec_jax.load(own)
  with pytest.raises(ValueError, match='is for drafter assistant, not eagle'):
    specdec_jax.load(target, drafter='eagle', draft_model=own, gamma=1)


def test_random_weights_will_do_to_time_shapes(monkeypatch):
  config = toy_gemma.gemma_4_moe(V, max_positions=128)
  own = toy_assistant.config(config, num_clusters=8, num_chosen_clusters=3)
  monkeypatch.setitem(presets.PRESETS, 'tiny', config)
  monkeypatch.setitem(presets.ASSISTANTS, 'tiny_assistant', own)
  load = functools.partial(specdec_jax.load, 'random:tiny')
  decoder = load(draft_model='random:tiny_assistant', gamma=2)
  assert isinstance(decoder.recipe.drafter, drafters.Assistant)
  assert generate(decoder) == generate(load(drafter='none'))
