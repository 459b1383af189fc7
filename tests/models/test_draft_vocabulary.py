"""Draft models that draft few of the target's tokens."""

import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import specdec_jax
from specdec_jax import drafters
from specdec_jax.base import Context, Params
from specdec_jax.models import families, products
from specdec_jax.models.drafting import draft_vocabulary
from specdec_jax.sampling import keys, logits
from tests import decoders, slow, toy, toy_grammar, toy_t5
from tests.cli import tiny

V, GAMMA, MAX_LEN = 12, 3, 24
IDS = np.array([1, 2, 4, 7, 10, 11], np.int32)
OTHERS = np.setdiff1d(np.arange(V), IDS)
CONFIGS = {
  'Llama': toy.llama_config(V),
  'Llama, tied': toy.llama_config(V, is_tied=True),
  'T5': toy_t5.config(V, is_tied=False),
  'T5, tied': toy_t5.config(V, is_tied=True),
  # A CPU's copy of its logits' kernel is [V, embed].
  'Llama, few tokens': toy.llama_config(V, embed_dim=V + 4),
}
ROWS = [[3, 4, 5], [2], [7, 9], [10, 4, 4]]


def params_of(config):
  make = toy_t5.params if families.has_encoder(config) else toy.llama_params
  return make(config, seed=1)


def prompt_of(config):
  is_t5 = families.has_encoder(config)
  return toy.prompt(ROWS, width=3, encoder_rows=ROWS if is_t5 else None)


@pytest.mark.slow
@pytest.mark.parametrize('has_copies', [False, True])
@pytest.mark.parametrize('name', CONFIGS)
def test_logits_are_the_whole_models_at_the_tokens(name, has_copies):
  config = CONFIGS[name]
  params = params_of(config)
  if has_copies:
    params = products.with_cpu_copies(params, is_tied=config.is_tied)
  model = families.language_model(config)
  prompt = prompt_of(config)

  def extend(model, params):
    model = toy.compiled(model)
    cache = model.init(params, prompt, MAX_LEN)
    return np.asarray(model.extend(params, prompt.decoder_tokens, cache)[0])

  expected = extend(model, params)
  assert expected.shape[-1] == V
  cut = draft_vocabulary.with_logits_of(params, IDS, is_tied=config.is_tied)
  few, whole = families.with_draft_vocabulary(model, IDS, V)
  assert (few.vocab_size, whole.vocab_size) == (IDS.size, V)
  found = extend(few, cut)
  np.testing.assert_allclose(found, expected[..., IDS], rtol=1e-6, atol=1e-6)
  spread = extend(whole, cut)
  np.testing.assert_array_equal(spread[..., IDS], found)
  assert np.all(spread[..., OTHERS] == draft_vocabulary.NEVER)


def decode(name: str, token_ids: np.ndarray):
  """Greedy decodes of a target, with its perturbed self as a draft and
  without."""
  config = CONFIGS[name]
  model = families.language_model(config)
  few, _ = families.with_draft_vocabulary(model, IDS, V)
  drafter = drafters.autoregressive(
    few,
    gamma=GAMMA,
    logits_to_probs=decoders.GREEDY,
    is_argmax=True,
    token_ids=token_ids,
  )
  own = toy.perturb(params_of(config), seed=2, scale=0.3)
  own = draft_vocabulary.with_logits_of(own, IDS, is_tied=config.is_tied)
  target_params, prompt = params_of(config), prompt_of(config)
  options = {'to_probs': decoders.GREEDY, 'max_len': MAX_LEN}
  return (
    decoders.speculate(
      model, Params(target_params, own), drafter, prompt, **options
    ),
    decoders.plain(model, Params(target_params), prompt, **options),
  )


@slow.parametrize('name', CONFIGS, now=['T5, tied'])
def test_greedy_decoding_is_the_targets_own(name):
  found, plain = decode(name, IDS)
  np.testing.assert_array_equal(found.tokens, plain.tokens)
  accepted = np.sum(found.statistics.num_accepted)
  assert 0 < accepted < np.sum(found.statistics.num_drafted)
  # Places in the draft vocabulary are other tokens of the target's.
  wrong, _ = decode(name, np.arange(IDS.size))
  np.testing.assert_array_equal(wrong.tokens, plain.tokens)
  assert np.sum(wrong.statistics.num_accepted) < accepted


@slow.parametrize('num_rows', [1, 4], now=[1])
def test_a_draft_model_reads_what_a_grammar_forced(num_rows):
  """Of tokens that it cannot draft; drafts of the target itself are right."""
  config, forced = CONFIGS['Llama'], OTHERS[OTHERS > 0]
  model = families.language_model(config)
  params = toy.llama_params(config, seed=4)
  few, _ = families.with_draft_vocabulary(model, IDS, V)
  own = draft_vocabulary.with_logits_of(params, IDS, is_tied=False)
  drafter = drafters.autoregressive(
    few, gamma=4, logits_to_probs=decoders.GREEDY, is_argmax=True, token_ids=IDS
  )
  # The forced ones, one by one, then any of the draft vocabulary.
  letters = toy_grammar.letters(V)
  spell = lambda ids: ''.join(letters.tokens()[i] for i in ids)
  grammar = toy_grammar.of_rows(
    *(
      f'start: /{spell(forced[row:])}[{spell(IDS)}]{{40}}/'
      for row in range(num_rows)
    ),
    vocabulary=letters,
  )
  prompt = toy.prompt(ROWS[:num_rows]).replace(grammar=grammar)
  found = decoders.speculate(
    *(model, Params(params, own), drafter, prompt),
    to_probs=decoders.GREEDY,
    max_len=MAX_LEN,
  )
  # What is free is no mere repetition.
  for row in found.tokens[:, 8:]:
    assert np.unique(row).size > 2
  counts = found.statistics
  np.testing.assert_array_equal(counts.num_accepted, counts.num_tested)


@pytest.mark.slow
@pytest.mark.parametrize('name', ['Llama', 'T5, tied'])
def test_sampled_drafts_are_of_the_draft_vocabulary(name):
  config = CONFIGS[name]
  model = families.language_model(config)
  _, whole = families.with_draft_vocabulary(model, IDS, V)
  drafter = drafters.autoregressive(
    whole, gamma=GAMMA, logits_to_probs=logits.standardize(temperature=1.5)
  )
  params = draft_vocabulary.with_logits_of(
    params_of(config), IDS, is_tied=config.is_tied
  )
  prompt = prompt_of(config)
  context = Context(
    tokens=jnp.pad(prompt.decoder_tokens, ((0, 0), (0, MAX_LEN - 3))),
    lengths=prompt.decoder_lengths,
  )
  own = drafter.init(params, prompt, MAX_LEN)
  row_keys = keys.row_keys(jax.random.key(0), prompt.row_ids)
  draft, _ = jax.jit(drafter.propose)(params, row_keys, context, own)
  assert np.all(np.isin(draft.tokens, IDS))
  # The rule judges by the q that the tokens were drawn from.
  np.testing.assert_allclose(np.sum(draft.probs, -1), 1.0, rtol=1e-5)
  assert np.all(draft.probs[..., IDS] > 0)
  assert np.all(draft.probs[..., OTHERS] == 0)


def test_token_ids_are_for_greedy_drafts():
  model = toy.llama(V)
  with pytest.raises(ValueError, match='is_argmax'):
    drafters.autoregressive(
      model,
      gamma=2,
      logits_to_probs=logits.standardize(),
      token_ids=IDS,
    )


def write_ids(folder: str, text: str) -> None:
  (Path(folder) / 'draft_vocabulary.json').write_text(text)


@pytest.mark.slow
@pytest.mark.parametrize('temperature', [0.0, 0.8])
def test_a_file_beside_the_weights_states_it(tmp_path, temperature):
  target = tiny.write_model(tmp_path / 'target', seed=1)
  draft = tiny.write_model(tmp_path / 'draft', seed=1)
  texts = ['the in ab', 'ab', 'in the the']

  def decode(**options):
    decoder = specdec_jax.load(target, temperature=temperature, **options)
    done = list(specdec_jax.generate(decoder, texts, max_new_tokens=12))
    accepted = sum(each.statistics['accepted'] for each in done)
    return [each.tokens for each in done], accepted

  plain, _ = decode(drafter='none')
  _, most = decode(draft_model=draft, gamma=3)
  # A token that the texts have, and tokens that they may have.
  drafted = sorted({plain[0][0], *range(3, 60)})
  write_ids(draft, json.dumps({'ids': drafted}))
  found, accepted = decode(draft_model=draft, gamma=3)
  assert 0 < accepted < most
  if not temperature:
    assert found == plain
    # A grammar knows more ids than are drafted.
    regex = {'regex': '[a-z ]{20,40}', 'max_new_tokens': 5}
    for options in ({'drafter': 'none'}, {'draft_model': draft, 'gamma': 3}):
      decoder = specdec_jax.load(target, **options)
      [done] = specdec_jax.generate(decoder, texts[:1], **regex)
      plain.append(done.tokens)
    assert plain[-1] == plain[-2]


@pytest.mark.parametrize(
  ('text', 'message'),
  [
    ('', 'no JSON'),
    ('{}', 'ids'),
    ('{"ids": []}', 'different token ids'),
    ('{"ids": [3, 4, 3]}', 'different token ids'),
    ('{"ids": [3, 100000]}', 'ids'),
    ('{"ids": [-1]}', 'ids'),
    ('{"ids": "3"}', 'ids'),
  ],
)
def test_a_wrong_file_is_refused(tmp_path, text, message):
  folder = tiny.write_model(tmp_path / 'draft')
  write_ids(folder, text)
  with pytest.raises(ValueError, match=f'draft_vocabulary.json.*{message}'):
    specdec_jax.load(folder, draft_model=folder)
