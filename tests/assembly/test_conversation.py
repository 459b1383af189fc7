"""A conversation decodes as one long prompt does, and feeds what is new."""

import pytest

pytest.importorskip('safetensors')
pytest.importorskip('tokenizers')
pytest.importorskip('jinja2')

import specdec_jax
from specdec_jax.assembly import conversation
from tests.cli import tiny

NUM_NEW = 8
TEXTS = ['the in ab', 'ab', 'in the the', 'the ab ab ab', 'in']


@pytest.fixture(scope='module')
def folder(tmp_path_factory) -> str:
  path = tmp_path_factory.mktemp('conversation') / 'tiny'
  return tiny.write_model(path, max_positions=512)


@pytest.fixture(
  scope='module', params=[None, pytest.param('int8', marks=pytest.mark.slow)]
)
def decoder(folder, request):
  return specdec_jax.load(
    folder, cache_dtype=request.param, drafter='prompt_lookup', gamma=2
  )


@pytest.fixture
def chat(decoder):
  return specdec_jax.Conversation(decoder, max_new_tokens=NUM_NEW)


def whole(decoder, *dialogues):
  """What each of some lists of messages is answered with, as one prompt."""
  found = specdec_jax.generate(
    decoder, dialogues, max_new_tokens=NUM_NEW, batch_size=len(dialogues)
  )
  return [each.tokens for each in found]


def test_ten_turns_are_ten_long_prompts(decoder, chat):
  asked, answers, lengths = [], [], []
  for text in TEXTS * 2:
    asked.append([*chat.messages, {'role': 'user', 'content': text}])
    lengths.append(len(decoder.vocabulary.encode_chat(asked[-1])))
    answers.append(chat.send(text))
    # At most what was asked and answered since, in whole blocks of 32.
    most = lengths[-1] - (lengths[-2] if len(lengths) > 1 else 0)
    assert 0 < chat.num_fed <= most + -most % 32
    assert chat.messages[-1]['content'] == answers[-1].text
  assert lengths[-1] > 6 * chat.num_fed
  assert [each.tokens for each in answers] == whole(decoder, *asked)


@pytest.mark.slow
def test_a_long_conversation_may_begin_again(monkeypatch, decoder):
  monkeypatch.setattr(conversation, '_ROOM', 64)
  chat = specdec_jax.Conversation(decoder, max_new_tokens=NUM_NEW)
  first = chat.send('ab')
  chat.send('the in ab ' * 20)
  chat.reset()
  assert chat.send('ab').tokens == first.tokens


def test_a_stream_that_is_never_iterated_leaves_nothing_behind(chat):
  stream = chat.stream('the in ab')
  chat.stream('in')
  assert chat.messages == []
  assert stream.completion is None


def test_an_interrupt_may_hit_the_reading(monkeypatch, decoder, chat):
  chat.send('the in ab')
  compiled = conversation.running.compiled

  def interrupted(*args):
    params, (prefill, read_on, *loop) = compiled(*args)

    def read(*args):
      read_on(*args)
      raise KeyboardInterrupt

    return params, (prefill, read, *loop)

  with monkeypatch.context() as patch:
    patch.setattr(conversation.running, 'compiled', interrupted)
    with pytest.raises(KeyboardInterrupt):
      chat.send('in')
  asked = [*chat.messages, {'role': 'user', 'content': 'ab'}]
  assert [chat.send('ab').tokens] == whole(decoder, asked)


def test_the_next_message_breaks_an_answer_off(decoder, chat):
  answer = chat.stream('the in ab')  # It lives on, in the middle.
  said = next(iter(answer))
  later = chat.stream('ab')
  roles = [each['role'] for each in chat.messages]
  assert roles == ['user', 'assistant']
  assert chat.messages[-1]['content'] == said
  asked = [*chat.messages, {'role': 'user', 'content': 'ab'}]
  assert ''.join(later) == later.completion.text
  assert [later.completion.tokens] == whole(decoder, asked)
  assert list(answer) == []
  chat.stream('in')  # Nobody reads it.
  chat.reset()
  assert chat.messages == []
