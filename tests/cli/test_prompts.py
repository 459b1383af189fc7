"""Prompts as files hold them."""

import io
import json
import sys

import pytest

from specdec_jax.text import prompts, tasks
from tests.cli import tiny
from tests.cli.tiny import assert_refused


def read(tmp_path, data: bytes, name: str = 'prompts.txt') -> list[str]:
  path = tmp_path / name
  path.write_bytes(data)
  return [line.text for line in prompts.read(None, str(path))]


@pytest.mark.parametrize(
  'data',
  [
    b'one\n two \n',
    b'one\r\n two \r\n',
    b'\xef\xbb\xbfone\n\n  \n two \n\n',
  ],
)
def test_one_prompt_a_line(tmp_path, data):
  assert read(tmp_path, data) == ['one', ' two ']


@pytest.mark.parametrize('data', [b'a\rb\r\nc', b'\xef\xbb\xbfa\rb\n\nc\n'])
def test_prompts_and_tasks_have_the_same_lines(tmp_path, monkeypatch, data):
  """A carriage return alone ends none."""
  assert read(tmp_path, data) == ['a\rb', 'c']
  task = tasks.find(str(tmp_path / 'prompts.txt'))
  assert [example.inputs for example in task.read()] == ['a\rb', 'c']
  stream = io.TextIOWrapper(io.BytesIO(data))
  monkeypatch.setattr(sys, 'stdin', stream)
  assert [line.text for line in prompts.read(None, '-')] == ['a\rb', 'c']


def test_other_separators_stay_in_their_line(tmp_path):
  text = 'a\u2028b\x0bc\x0cd\x85e'
  assert read(tmp_path, f'{text}\nf'.encode()) == [text, 'f']
  line = json.dumps({'prompt': text}, ensure_ascii=False)
  assert read(tmp_path, line.encode(), 'a.jsonl') == [text]


@pytest.mark.parametrize('name', ['a.jsonl', 'a.txt'])
def test_jsonl_by_its_name_or_first_line(tmp_path, name):
  data = b'\xef\xbb\xbf{"prompt": "one\\ntwo", "id": 7}\r\n\r\n{"prompt":"3"}'
  assert read(tmp_path, data, name) == ['one\ntwo', '3']


def test_text_may_hold_braces(tmp_path):
  lines = ['{ for (;;);', 'b', '{"prompt": "c"}']
  assert read(tmp_path, '\n'.join(lines).encode()) == lines


def test_standard_input_is_utf8_whatever_the_locale(monkeypatch):
  stream = io.TextIOWrapper(io.BytesIO('é\nö'.encode()), encoding='ascii')
  monkeypatch.setattr(sys, 'stdin', stream)
  assert [line.text for line in prompts.read(None, '-')] == ['é', 'ö']


def test_a_closed_standard_input_is_refused(run, monkeypatch):
  monkeypatch.setattr(sys, 'stdin', None)
  result = run('generate', '--prompts', '-')
  assert_refused(result, 'standard input', '--prompts -')


def test_a_file_may_hold_conversations(run, model, tmp_path):
  path = tmp_path / 'a.jsonl'
  turns = [{'role': 'user', 'content': 'ab'}]
  path.write_text(
    json.dumps({'messages': turns, 'tools': None}) + '\n{"prompt": "ab"}'
  )
  command = ('generate', '--model', model, '--max_new_tokens=4', '--json=-')
  chat = run(*command, '--prompt', 'ab', '--chat').records()[0]
  found, plain = run(*command, '--prompts', path).records()
  assert (found['prompt'], found['tokens']) == ('ab', chat['tokens'])
  assert plain['tokens'] != chat['tokens']


def test_a_conversation_that_the_template_refuses_is_named(
  run, model, tmp_path
):
  path = tmp_path / 'a.jsonl'
  path.write_text('{"prompt": "ab"}\n{"messages": [{"role": "user"}]}\n')
  result = run('generate', '--model', model, '--prompts', path)
  assert_refused(result, 'prompt 2: the chat template failed', 'content')


COMPLAINTS = {
  'no list': ('a.jsonl', b'{"messages": "a"}', 'line 1', 'list of objects'),
  'no role': ('a.jsonl', b'{"messages": [{"content": 1}]}', 'line 1', 'role'),
  'half': ('a.jsonl', rb'{"messages": [{"role": "\ud800"}]}', 'Unicode'),
  'wrong key': ('a.jsonl', b'{"prompt": "a"}\n{"text": 1}', 'line 2', "'text'"),
  'no text': ('a.txt', b'{"prompt": 3}', 'line 1', 'no text under "prompt"'),
  'blank': ('a.jsonl', b'{"prompt": " "}', 'line 1', 'empty'),
  'broken': ('a.jsonl', b'{"prompt": "a"}\n\n{"prom', 'line 3', '.txt'),
  'broken later': ('a.txt', b'{"prompt": "a"}\nb', 'line 2', 'not JSON'),
  'a list': ('a.jsonl', b'["a"]', 'line 1', '{"prompt": "..."}'),
  'deep': ('a.jsonl', b'[' * 200_000, 'line 1', 'not JSON'),
  'surrogate': ('a.jsonl', rb'{"prompt": "\ud800"}', 'line 1', 'Unicode'),
  'not UTF-8': ('a.txt', b'ok\n\xff', 'a.txt, line 2', 'not UTF-8', 'byte 3'),
  'nothing': ('a.txt', b'\n \n', 'has no prompt'),
}


@pytest.mark.parametrize('case', COMPLAINTS)
def test_a_bad_file_is_refused(run, tmp_path, case):
  name, data, *parts = COMPLAINTS[case]
  path = tmp_path / name
  path.write_bytes(data)
  assert_refused(run('generate', '--prompts', path), *parts)


def test_an_unreadable_file_is_refused(run, tmp_path):
  for path in (tmp_path / 'none.txt', tmp_path):
    result = run('generate', '--prompts', path)
    assert_refused(result, f'{path}: ')


def test_a_special_token_without_an_embedding(run, make_model):
  """Small models of a family can have the tokenizer of one that also sees."""
  tokenizer = tiny.make_tokenizer()
  tokenizer.add_special_tokens(['<image>'])
  model = make_model('without_images', tokenizer=tokenizer)
  command = ('generate', '--model', model, '--max_new_tokens', '4', '--prompt')
  assert run(*command, 'a b').status == 0
  assert_refused(run(*command, 'a <image> b'), "prompt 1 has token '<image>'")
