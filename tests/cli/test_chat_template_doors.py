"""Chat templates at every door: their variables, such as `enable_thinking`, and
texts that lack one."""

import io
import json
import sys

import pytest

pytest.importorskip('jinja2')

import specdec_jax
from tests.cli import tiny
from tests.cli.tiny import assert_refused

TEMPLATE = tiny.TEMPLATE + (
  '{% if enable_thinking is defined and not enable_thinking %}in the ab'
  '{% endif %}'
)
# As rendered, for a model that continues it: with the default, and without.
THINKING = '<|im_start|>user\nab<|im_end|>\n<|im_start|>assistant\n'
SILENT = THINKING + 'in the ab'
OFF = {'enable_thinking': False}
NUM_NEW = 8


@pytest.fixture(scope='module')
def model(tmp_path_factory):
  path = tmp_path_factory.mktemp('variables') / 'tiny'
  return tiny.write_model(path, chat_template=TEMPLATE, max_positions=256)


@pytest.fixture(scope='module')
def decoder(model):
  return specdec_jax.load(model, drafter='none')


@pytest.fixture(scope='module')
def expected(decoder):
  """The texts after the default and without thoughts."""
  found = specdec_jax.generate(
    decoder, [THINKING, SILENT], max_new_tokens=NUM_NEW
  )
  texts = [each.text for each in found]
  assert texts[0] != texts[1]
  return texts


@pytest.fixture
def prompts_file(tmp_path):
  path = tmp_path / 'prompts.jsonl'
  message = {'role': 'user', 'content': 'ab'}
  lines = [
    {'messages': [message]},
    {'messages': [message], 'chat_template_kwargs': OFF},
    {'prompt': 'ab', 'chat_template_kwargs': OFF},
    {'prompt': 'ab', 'chat_template_kwargs': {'enable_thinking': True}},
    {'prompt': 'ab'},
  ]
  path.write_text('\n'.join(map(json.dumps, lines)))
  return path


def test_in_python(decoder, expected):
  thinking, silent = expected
  how = {'max_new_tokens': NUM_NEW, 'chat': True}
  texts = ['ab', [{'role': 'user', 'content': 'ab'}]]
  decode = lambda given: [
    each.text
    for each in specdec_jax.generate(
      decoder, texts, chat_template_kwargs=given, **how
    )
  ]
  assert decode(None) == [thinking] * 2
  assert decode(OFF) == [silent] * 2
  assert decode([OFF, None]) == [silent, thinking]
  stream = specdec_jax.stream(decoder, 'ab', chat_template_kwargs=OFF, **how)
  assert ''.join(stream) == silent
  talk = specdec_jax.Conversation(
    decoder, chat_template_kwargs=OFF, max_new_tokens=NUM_NEW
  )
  assert talk.send('ab').text == silent


@pytest.mark.parametrize(
  ('chat', 'variables', 'message'),
  [
    (True, [OFF], 'lists 1 for 2 texts'),
    (True, 'off', 'should be an object'),
    (True, {1: 2}, 'should be an object'),
    (True, {'a': {1}}, 'not JSON serializable'),
    (False, OFF, 'kwargs are for chat, and text 1 is no'),
  ],
)
def test_variables_that_are_refused(decoder, chat, variables, message):
  with pytest.raises(ValueError, match=message):
    specdec_jax.generate(
      decoder, ['ab', 'ab'], chat=chat, chat_template_kwargs=variables
    )


def test_a_conversation_takes_an_object_of_variables(decoder):
  with pytest.raises(ValueError, match='should be an object'):
    specdec_jax.Conversation(decoder, chat_template_kwargs=3)


def test_on_the_command_line(
  run, model, expected, prompts_file, tmp_path, monkeypatch
):
  thinking, silent = expected
  usual = ('--model', model, '--drafter=none', '--max_new_tokens', NUM_NEW)
  generate = lambda *options: [
    line['text']
    for line in run('generate', *usual, '--json=-', *options).records()
  ]
  off = ('--chat_template_kwargs', json.dumps(OFF))
  # What a line says comes before the flag.
  lines = ('--chat', '--prompts', prompts_file)
  assert generate(*lines, *off) == [silent, silent, silent, thinking, silent]
  monkeypatch.setattr(sys, 'stdin', io.StringIO('ab\n'))
  assert run('chat', *usual, *off).out == f'{silent}\n'
  prompt = ('--prompt=ab', '--chat')
  refused = run('generate', *usual, '--prompt=ab', *off)
  assert_refused(refused, '--chat_template_kwargs is for --chat')
  refused = run('generate', *usual, *prompt, '--chat_template_kwargs=[1]')
  assert_refused(refused, 'must be an object of JSON, got [1]')
  path = tmp_path / 'wrong.jsonl'
  path.write_text('{"prompt": "ab", "chat_template_kwargs": [1]}')
  refused = run('generate', *usual, '--prompts', path)
  assert_refused(refused, 'line 1', 'chat_template_kwargs should be an object')


def test_an_empty_text_without_chat_is_explained(run, make_model, caplog):
  model = make_model('ending_at_once')
  command = ('generate', '--model', model, '--drafter=none', '--prompt=ab')
  limit, ending = '--max_new_tokens=8', '--logit_bias={"2": 1000}'
  assert run(*command, limit).err == ''
  assert run(*command, limit, '--chat', ending).err == ''
  told = run(*command, limit, ending)
  assert (told.status, told.out) == (0, '\n')
  line = f'{model} ended a text at once: it has a chat template'
  assert told.err.startswith(f'specdec: {line}')
  assert '--chat' in told.err
  # Once for each model; here another one, in Python.
  decoder = specdec_jax.load(make_model('ending_too'), drafter='none')
  caplog.clear()
  how = {'max_new_tokens': 8, 'logit_bias': {2: 1000}}
  assert ''.join(specdec_jax.stream(decoder, 'ab', **how)) == ''
  for is_chat in (True, False):
    list(specdec_jax.generate(decoder, ['ab'], chat=is_chat, **how))
  assert [message.split(':')[0] for message in caplog.messages] == [
    f'{decoder.model.checkpoint} ended a text at once'
  ]
