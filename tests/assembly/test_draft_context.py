"""A draft model whose context is shorter than the target's."""

import logging

import pytest

pytest.importorskip('safetensors')
pytest.importorskip('tokenizers')
pytest.importorskip('jinja2')

import specdec_jax
from specdec_jax.assembly import packing
from tests.cli import tiny

LONG, SHORT, GAMMA = 256, 64, 3
# Of one token per two bytes: the first outgrows the draft model's context, the
# second begins beyond it.
TEXTS = ['the in ab', 'the in ' * 40]


@pytest.fixture(scope='module')
def folders(tmp_path_factory):
  folder = tmp_path_factory.mktemp('contexts')
  target = tiny.write_model(
    folder / 'target', max_positions=LONG, eos_token=None
  )
  draft = tiny.write_model(
    folder / 'draft', max_positions=SHORT, eos_token=None
  )
  return target, draft


@pytest.fixture(scope='module')
def decoder(folders):
  target, draft = folders
  return specdec_jax.load(target, draft_model=draft, gamma=GAMMA)


def test_longer_texts_are_decoded_on_without_drafts(decoder, caplog):
  packing._tell.cache_clear()
  options = {'max_new_tokens': 90, 'batch_size': 2}
  with caplog.at_level(logging.WARNING, 'specdec_jax'):
    made = [*specdec_jax.generate(decoder, TEXTS, **options)]
  plain = [*specdec_jax.generate(decoder.at(0), TEXTS, **options)]
  assert [each.tokens for each in made] == [each.tokens for each in plain]
  crossing, beyond = (each.statistics for each in made)
  num_prompt = len(made[0].context) - len(made[0].tokens)
  assert num_prompt + 90 > SHORT > num_prompt + GAMMA
  # Its drafts are all taken, being the target's: 4 tokens per run to the end of
  # the context, and one afterwards.
  assert crossing['accepted'] == crossing['drafted']
  ends = num_prompt + crossing['drafted'] * (GAMMA + 1) // GAMMA
  assert SHORT - GAMMA < ends <= SHORT + 1
  assert beyond['drafted'] == 0
  assert beyond['target_runs'] == beyond['tokens'] == 90
  [line] = [record.getMessage() for record in caplog.records]
  assert 'draft has a context of 64 tokens' in line


def test_drawn_tokens_beyond_it_are_plain_decodings(decoder):
  options = {'max_new_tokens': 16, 'temperature': 1.0, 'seed': 5}
  [made] = specdec_jax.generate(decoder, TEXTS[1:], **options)
  [plain] = specdec_jax.generate(decoder.at(0), TEXTS[1:], **options)
  assert made.tokens == plain.tokens


def test_a_conversation_goes_on_beyond_it(decoder):
  chat = specdec_jax.Conversation(decoder, max_new_tokens=24)
  plain = specdec_jax.Conversation(decoder.at(0), max_new_tokens=24)
  for _ in range(3):
    answer = chat.send('the in ab')
    assert answer.tokens == plain.send('the in ab').tokens
  assert len(answer.context) > SHORT
  # Begun again, it drafts again.
  chat.reset()
  plain.reset()
  answer = chat.send('ab')
  assert answer.tokens == plain.send('ab').tokens
  assert answer.statistics['accepted'] > 0


def test_a_draft_that_the_context_of_the_draft_model_cannot_hold(folders):
  target, draft = folders
  with pytest.raises(ValueError, match=r'gamma 64 .* context of 64'):
    specdec_jax.load(target, draft_model=draft, gamma=64)
