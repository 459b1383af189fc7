"""Conversations with a Gemma 4 that thinks: what it thought leaves its turns,
and answers are those to one long prompt."""

import pytest

pytest.importorskip('safetensors')
pytest.importorskip('tokenizers')
pytest.importorskip('jinja2')

import json

import specdec_jax
from specdec_jax.checkpoints import huggingface
from specdec_jax.text import vocabularies
from tests import gemma4_template, slow, toy_assistant, toy_gemma
from tests.cli import tiny
from tests.gemma4_template import CLOSE, OPEN, SPECIALS

TOKENS = [*tiny.make_tokens(), *SPECIALS]
NUM_NEW = 12
# So that a network of random weights thinks: of characters that show, in
# thoughts that open, and end soon.
OPTIONS = {
  'logit_bias': {TOKENS.index(OPEN): 3.0, TOKENS.index(CLOSE): 3.0},
  'repetition_penalty': 1.5,
  'suppress_tokens': [
    i
    for i, token in enumerate(TOKENS)
    if not (token.isascii() and token.isalpha()) and token not in (OPEN, CLOSE)
  ],
}


@pytest.fixture(scope='module')
def folders(tmp_path_factory) -> tuple[str, str]:
  """Of a target with Gemma 4's special tokens and template, and of an
  assistant."""
  path = tmp_path_factory.mktemp('thoughts')
  sizes = toy_gemma.gemma_4_e2b(len(TOKENS), max_positions=512)
  huggingface.save(path / 'target', sizes, toy_gemma.params(sizes, seed=1))
  tokenizer = tiny.make_tokenizer(TOKENS)
  tokenizer.add_special_tokens([*SPECIALS])
  tokenizer.save(str(path / 'target/tokenizer.json'))
  settings = {
    'eos_token': '<turn|>',
    'bos_token': '<|endoftext|>',
    'chat_template': gemma4_template.TEMPLATE,
  }
  (path / 'target/tokenizer_config.json').write_text(json.dumps(settings))
  own = toy_assistant.config(sizes)
  huggingface.save(path / 'own', own, toy_assistant.params(own, seed=2))
  return str(path / 'target'), str(path / 'own')


@slow.parametrize('is_thinking', [True, False], now=[True])
def test_turns_lose_what_was_thought(folders, is_thinking):
  target, own = folders
  decoder = specdec_jax.load(target, draft_model=own, gamma=2, **OPTIONS)
  variables = {'enable_thinking': is_thinking}
  chat = specdec_jax.Conversation(
    decoder, max_new_tokens=NUM_NEW, chat_template_kwargs=variables
  )
  num_thoughts = 0
  for text in ('the in ab', 'ab', 'in the', 'the'):
    asked = [*chat.messages, {'role': 'user', 'content': text}]
    prompt = vocabularies.apply_chat_template(
      decoder.vocabulary, asked, template_kwargs=variables
    )
    # Only the turn that follows may have an empty thought, at its beginning.
    turns, _, last = prompt.rpartition('<|turn>model\n')
    assert OPEN not in turns
    assert CLOSE not in turns
    assert last == ('' if is_thinking else f'{OPEN}thought\n{CLOSE}')
    answer = chat.send(text)
    said = chat.messages[-1]['content']
    ids = [i for i in answer.tokens if i not in decoder.vocabulary.eos_ids]
    assert said == decoder.vocabulary.decode(ids, keep_special=True)
    assert said.replace(OPEN, '').replace(CLOSE, '') == answer.text
    num_thoughts += said.count(OPEN)
    [whole] = specdec_jax.generate(
      decoder,
      [asked],
      max_new_tokens=NUM_NEW,
      chat_template_kwargs=variables,
    )
    assert answer.tokens == whole.tokens
  assert num_thoughts >= 2


@pytest.mark.slow
def test_an_answer_that_is_broken_off_keeps_the_beginning_of_a_thought(folders):
  decoder = specdec_jax.load(folders[0], drafter='none', **OPTIONS)
  whole = specdec_jax.Conversation(decoder, max_new_tokens=NUM_NEW)
  whole.send('the in ab')
  chat = specdec_jax.Conversation(decoder, max_new_tokens=NUM_NEW)
  pieces = chat.stream('the in ab')
  shown = next(pieces) + next(pieces)
  pieces.close()
  said = chat.messages[-1]['content']
  assert whole.messages[-1]['content'].startswith(said)
  assert said.replace(OPEN, '').replace(CLOSE, '') == shown
