"""Drafters, rules and gammas, as a user chooses them by `specdec_jax.load`."""

import functools
import json
import shutil
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

pytest.importorskip('safetensors')
pytest.importorskip('tokenizers')

import specdec_jax
from specdec_jax import lazy
from specdec_jax.assembly import drafters, rules, usual
from specdec_jax.assembly.gamma_memory import RememberedGamma
from specdec_jax.assembly.models import Model
from specdec_jax.checkpoints import huggingface
from specdec_jax.cli import main
from tests import toy_eagle
from tests.assembly.tiny_api import NUM_NEW, TEXTS, generate
from tests.cli import tiny


def test_choices_may_be_those_of_numpy(folder):
  made, same = (
    specdec_jax.load(
      folder,
      gamma=number(3),
      max_ngram=number(2),
      temperature=1.0,
      top_k=number(4),
      suppress_tokens=array([5, 7]),
      logit_bias={number(6): 1.5},
      sequence_bias={(number(5), number(7)): -2.5},
    )
    for number, array in ((np.int64, np.array), (int, list))
  )
  assert made.recipe == same.recipe
  assert repr(made.sampling) == repr(same.sampling)
  assert made.at(np.int32(2)) is not None
  counts = {'batch_size': np.int64(2), 'max_new_tokens': np.int64(1)}
  specdec_jax.generate(made, TEXTS[:2], top_logprobs=np.int32(1), **counts)


def test_options_may_be_paths(folder, tmp_path):
  path = tmp_path / 'text.txt'
  path.write_text('the in ab')
  made = specdec_jax.load(folder, drafter='suffix', suffix_text=path)
  assert made.params.drafter.tokens.max() > 0


@pytest.mark.parametrize(
  ('gamma', 'error', 'message'),
  [
    (-1, ValueError, 'gamma'),
    (None, TypeError, 'integer'),
    (2.0, TypeError, 'integer'),
    ('2', TypeError, 'integer'),
  ],
)
def test_a_gamma_that_is_refused(decoder, gamma, error, message):
  generate(decoder, TEXTS[:1], temperature=0.5)  # Makes a decoder of samples.
  with pytest.raises(error, match=message):
    decoder.at(gamma)


@pytest.mark.parametrize(
  ('options', 'message'),
  [
    ({'max_ngrm': 2}, "'max_ngrm'.*mean max_ngram"),
    ({'drafter': 'modle'}, "'modle'.*prompt_lookup"),
    ({'verification': 'gready'}, "'gready'.*speculative_sampling"),
    ({'drafter': 'model'}, 'model needs a draft model'),
    (
      {'drafter': 'uniform', 'draft_model': '{folder}'},
      'draft model is for .*, not uniform',
    ),
    ({'draft_dtype': 'bfloat16'}, 'draft_dtype.*draft_model'),
    (
      {'drafter': drafters.NoDrafter(), 'draft_model': '{folder}'},
      'draft_model.*by name',
    ),
    ({'drafter': drafters.NoDrafter(), 'gamma': 2}, "called 'gamma'; they"),
    ({'dtype': 'float16'}, "is 'float16'.*'float32'"),
    ({'dtype': jnp.bfloat16}, "'float32'.*'bfloat16'"),
    ({'temperature': 'hot'}, "temperature.*'hot'"),
    ({'lenience': 0.5}, 'lenience 0.5 .*verification greedy'),
    (
      {'verification': 'greedy', 'temperature': 1.0},
      'greedy.*temperature 0, got 1.0',
    ),
    ({'drafter': 'ngram'}, 'ngram needs ngram_text'),
    ({'drafter': 'ngram', 'ngram_text': 'nowhere'}, 'ngram_text.*nowhere'),
    ({'drafter': 'suffix', 'suffix_text': 'nowhere'}, 'suffix_text.*nowhere'),
    ({'drafter': 'grammar', 'gamma': 0}, 'gamma.*0'),
    ({'top_k': 3}, 'top_k 3 .*temperature 0'),
    ({'gamma': 'atuo'}, "'atuo'.*'auto'"),
    ({'max_ngram': 2.5}, 'max_ngram is 2.5, expected int'),
    ({'draft_model': 'ende-spec-drafter'}, 'ende-spec-drafter.*has none'),
    ({'gamma': 500}, 'gamma 500.*128'),
    ({'verification': 'top_beta', 'gamma': 'auto'}, 'needs a gamma'),
    ({'exact_bits': True, 'gamma': 'auto'}, 'needs a gamma'),
  ],
)
def test_choices_that_are_refused(folder, options, message):
  given = {
    name: value.format(folder=folder) if isinstance(value, str) else value
    for name, value in options.items()
  }
  with pytest.raises(ValueError, match=message):
    specdec_jax.load(folder, **given)


def test_an_eagle_head_of_another_vocabulary_is_refused(
  folder, completions, tmp_path
):
  def head(num_more: int) -> str:
    size = tiny.make_config().vocab_size + num_more
    sizes = toy_eagle.config(
      tiny.make_config(), vocab_size=size, draft_vocab_size=size
    )
    path = tmp_path / str(num_more)
    huggingface.save(path, sizes, toy_eagle.params(sizes, seed=1))
    return str(path)

  load = functools.partial(specdec_jax.load, folder, drafter='eagle')
  with pytest.raises(ValueError, match='264 logits'):
    load(draft_model=head(2000))
  padded = head(8)
  shutil.copy(f'{folder}/tokenizer.json', padded)
  [found] = generate(load(draft_model=padded), TEXTS[:1])
  assert found.tokens == completions[0].tokens
  # The weights say what they are for.
  unnamed = specdec_jax.load(folder, draft_model=padded)
  assert isinstance(unnamed.recipe.drafter, drafters.Eagle)
  path = Path(padded) / 'tokenizer.json'
  path.write_text(path.read_text().replace('<|im_start|>', '<|start|>'))
  with pytest.raises(ValueError, match=r"'<\|start\|>'"):
    load(draft_model=padded)


def test_choices_may_be_objects(folder, completions):
  decoder = specdec_jax.load(
    folder,
    drafter=drafters.DraftModel(
      model=Model(checkpoint=folder, dtype='float32'), gamma=3
    ),
    verification=rules.Greedy(),
  )
  [found] = generate(decoder, TEXTS[:1])
  assert found.tokens == completions[0].tokens
  assert found.statistics['alpha'] == 1.0
  named = specdec_jax.load(Path(folder), draft_model=folder, gamma=3)
  assert isinstance(named.recipe.drafter, drafters.DraftModel)
  # The weights are those of the target, read once.
  leaves = [named.params.target, named.params.drafter]
  assert leaves[0] is leaves[1]


def test_a_gamma_that_nobody_gives_is_plain_decoding(
  folder, tmp_path, monkeypatch, caplog
):
  """By the very program of plain decoding, and until something is known."""
  monkeypatch.setenv('XDG_CACHE_HOME', str(tmp_path))
  caplog.set_level('INFO', logger='specdec_jax')
  auto = specdec_jax.load(folder)
  found = generate(auto, TEXTS)
  assert {(each.gamma, each.statistics['drafted']) for each in found} == {
    (0, 0)
  }
  assert [each.statistics['target_runs'] for each in found] == [NUM_NEW] * 5
  [sentence] = caplog.messages
  assert '`specdec bench` with the same options measures it' in sentence
  assert {key.recipe for key in auto.programs} == {auto.at(0).recipe}
  streamed = specdec_jax.stream(auto, TEXTS[0], max_new_tokens=NUM_NEW)
  assert ''.join(streamed) == found[0].text
  # What was measured holds for texts that may stop, and for streams.
  auto.gammas[2, 1] = RememberedGamma(gamma=3, source='bench')
  again = generate(auto, TEXTS, stop=['no such text'])
  assert {each.gamma for each in again} == {3}
  assert [each.tokens for each in again] == [each.tokens for each in found]
  # That bench chose 0 is said as such.
  auto.gammas[2, 1] = RememberedGamma(gamma=0, source='bench')
  generate(auto, TEXTS)
  assert 'bench chose 0 on 20' in caplog.messages[-1]


def test_to_measure_gamma_takes_the_extra_measure(folder, monkeypatch):
  decoder = specdec_jax.load(folder)
  monkeypatch.setattr(lazy, 'is_installed', lambda module: False)
  with pytest.raises(ValueError, match='needs the extra measure'):
    specdec_jax.generate(
      decoder, TEXTS, max_new_tokens=NUM_NEW, measure_gamma=True
    )


def test_what_changes_the_text_keeps_its_usual_gamma(folder):
  for more in ({'verification': 'top_beta'}, {'exact_bits': True}):
    decoder = specdec_jax.load(folder, **more)
    assert (decoder.is_auto, decoder.drafter.gamma) == (False, 8)
  assert specdec_jax.load(folder).is_auto


@pytest.mark.parametrize(
  ('checkpoint', 'name'),
  [
    (None, 'prompt_lookup'),
    ('ende-nano', 'model'),
    ('ende-spec-drafter', 'spec_drafter'),
    ('ende-block', 'block'),
    ('smollm2-135m-eagle', 'eagle'),
    ('no such model', 'model'),
  ],
)
def test_weights_name_their_drafter(checkpoint, name):
  assert usual.drafter(checkpoint) == name


def test_shipped_targets_have_shipped_drafters():
  """Unless an option says that another is meant; the folders exist."""
  of = usual.shipped
  eagle, pair = 'smollm2-135m-eagle', 'ende-nano'
  assert of('smollm2-135m', {}) == (eagle, {'lookup': True})
  given = {'gamma': 3, 'lookup': False, 'max_ngram': None}
  assert of('smollm2-135m', given) == (eagle, given)
  # A tree is not copied, and an n-gram or several copies are looked up.
  assert of('smollm2-135m', {'tree': 8}) == (eagle, {'tree': 8})
  for name in ('max_ngram', 'num_continuations', 'ngram_text'):
    assert of('smollm2-135m', {name: 2}) == (None, {name: 2})
  assert of('ende-mini', {'gamma': 4}) == (pair, {'gamma': 4})
  assert of('./ende-mini', {}) == (None, {})
  # A drafter given by name has its own, and no more options than are given.
  assert of('smollm2-135m', {}, 'eagle') == (eagle, {})
  kinds = {
    'model': pair,
    'spec_drafter': 'ende-spec-drafter',
    'block': 'ende-block',
    'eagle': None,
  }
  for kind, name in kinds.items():
    assert of('ende-mini', {'gamma': 4}, kind) == (name, {'gamma': 4})
  # The pair of language models loses, so that it has to be asked for.
  assert of('lm-mini', {})[0] is None
  assert of('lm-mini', {}, 'model')[0] == 'lm-nano'


def test_a_shipped_target_drafts_unasked(tmp_path):
  """In Python and on the command line."""
  choice = specdec_jax.load('ende-mini', gamma=3).recipe.drafter
  nano = Model(checkpoint='ende-nano', dtype='float32')
  assert (choice.model, choice.gamma) == (nano, 3)
  path = tmp_path / 'trace.jsonl'
  flags = '--model=ende-mini --gamma=3 --max_new_tokens=4 --prompt=text'
  assert main.main(['generate', *flags.split(), f'--trace={path}']) == 0
  header = json.loads(path.read_text('utf-8').splitlines()[0])
  assert (header['drafter'], header['gamma']) == ('ende-nano', 3)


def test_plain_decoding_has_no_gamma(decoder):
  plain = decoder.at(0)
  assert plain.at(0).drafter.gamma == 0
  with pytest.raises(ValueError, match='no gamma'):
    plain.at(4)
