"""Tasks over files, and SeqIO's where it is installed."""

import json
import sys

import pytest

from specdec_jax.text import tasks
from specdec_jax.text.prompts import Dialogue
from specdec_jax.text.tasks import Example


def read(path, **settings):
  return list(tasks.find(str(path), **settings).read())


def test_jsonl(tmp_path):
  path = tmp_path / 'some.jsonl'
  lines = [{'inputs': 'a', 'targets': 'b', 'more': 1}, {'inputs': 'ü'}]
  path.write_text('\n\n'.join(json.dumps(line) for line in lines) + '\n')
  examples = [Example(inputs='a', targets='b'), Example(inputs='ü')]
  assert read(path) == examples
  task = tasks.find(str(path))
  assert task.name == 'some'
  assert list(task.read()) == list(task.read())
  assert examples[0].fields() == {
    'inputs_pretokenized': 'a',
    'targets_pretokenized': 'b',
  }
  assert examples[1].fields() == {'inputs_pretokenized': 'ü'}


def test_other_fields_and_a_prefix(tmp_path):
  path = tmp_path / 'pairs.jsonl'
  path.write_text(json.dumps({'en': 'yes', 'de': 'ja'}))
  found = read(path, inputs_field='en', targets_field='de', prefix='to de: ')
  assert found == [Example(inputs='to de: yes', targets='ja')]


def test_messages(tmp_path):
  path = tmp_path / 'dialogues.jsonl'
  user, system = ({'role': x, 'content': x} for x in ('user', 'system'))
  lines = [{'inputs': 'user'}, {'messages': [user], 'targets': 'b'}]
  path.write_text('\n'.join(map(json.dumps, lines)))
  plain, messages = read(path)
  assert (plain.dialogue, messages.dialogue) == (None, Dialogue([user]))
  found = read(path, chat=True, system='system')
  assert [each.dialogue for each in found] == [Dialogue([system, user])] * 2
  assert [each.inputs for each in found] == ['user', 'user']


@pytest.mark.parametrize(
  ('settings', 'message'),
  [
    ({'system': 'system'}, 'system is for chat'),
    ({'prefix': 'to de: '}, 'prefix is for texts'),
  ],
)
def test_settings_that_messages_do_not_take(tmp_path, settings, message):
  path = tmp_path / 'dialogues.jsonl'
  lines = [{'inputs': 'a'}, {'messages': [{'role': 'user', 'content': 'a'}]}]
  path.write_text('\n'.join(map(json.dumps, lines)))
  with pytest.raises(ValueError, match=message):
    read(path, **settings)


def test_a_column_table_has_no_header(tmp_path):
  """As docs/launching.md says: every line is an example, and its first tab is
  the only one that separates."""
  table = tmp_path / 'a.tsv'
  table.write_text('inputs\ttargets\n\n \tb\n')
  assert read(table) == [
    Example(inputs='inputs', targets='targets'),
    Example(inputs=' ', targets='b'),
  ]


def test_text_and_tsv(tmp_path):
  text, table = tmp_path / 'a.txt', tmp_path / 'a.tsv'
  text.write_bytes('\ufeffone\ttwo\r\n\r\nthree'.encode())
  table.write_text('one\ttwo\tthree\nfour\n')
  assert read(text) == [Example(inputs='one\ttwo'), Example(inputs='three')]
  assert read(table) == [
    Example(inputs='one', targets='two\tthree'),
    Example(inputs='four'),
  ]


@pytest.mark.parametrize(
  ('content', 'part'),
  [
    (b'', 'has no example'),
    (b'{"inputs": "a"}\n\n"\xff', r'line 3 is not UTF-8.* at byte 18'),
    (b'{"inputs": "a"}\n{', 'line 2.*JSON'),
    (b'[1]', 'line 1.*object'),
    (b'{"text": "a"}', '"inputs".*\'text\''),
    (b'{"inputs": "a", "targets": 1}', 'no text.*"targets"'),
    (b'{"inputs": "\\ud800"}', 'not valid Unicode'),
    (b'{"messages": "a"}', 'messages should be a list'),
  ],
)
def test_bad_files(tmp_path, content, part):
  path = tmp_path / 'bad.jsonl'
  path.write_bytes(content)
  with pytest.raises(ValueError, match=part):
    read(path)


@pytest.mark.parametrize(
  ('name', 'settings', 'message'),
  [
    ('none.jsonl', {}, r'none\.jsonl'),
    ('wmt_t2t_ende', {}, 'did you mean wmt_t2t_ende_v003'),
    ('lm1b', {'chat': True}, 'prefix are for files'),
    ('lm1b', {'prefix': 'summarize: '}, 'prefix are for files'),
  ],
)
def test_tasks_that_are_refused(name, settings, message):
  with pytest.raises(ValueError, match=message):
    tasks.find(name, **settings)


def test_an_unknown_task_without_a_near_name_lists_all(monkeypatch):
  monkeypatch.setitem(sys.modules, 'seqio', None)
  with pytest.raises(ValueError, match='known: wmt_t2t_ende_v003, cnn_dail'):
    tasks.find('qqqq')
