"""Trace files: what goes in comes out, and errors name the line."""

import io
import json

import pytest

from specdec_jax.assembly import recording
from specdec_jax.assembly import trace_files as storage
from specdec_jax.cli import outputs
from tests.assembly import tiny_decodes as tiny
from tests.edits import edit_files


def write_all(path, records):
  with outputs.opened(str(path)) as file:
    for record in records:
      storage.write_record(file, record)


@pytest.fixture(scope='module')
def records():
  infos, _ = tiny.decode('lookup')
  state = recording.init(tiny.prompt())
  iterations = []
  for info in infos:
    new, state = recording.iteration_records(info, state, tiny.pieces)
    iterations.extend(new)
  summary = recording.summarize(iterations, tiny.GAMMA)
  return [
    recording.header(
      target='t', drafter='d', verification='v', gamma=tiny.GAMMA, note='é'
    ),
    *recording.prompt_records(tiny.prompt(), ['a', 'b']),
    *iterations,
    recording.summary_record(summary),
  ]


@pytest.fixture
def path(records, tmp_path):
  path = tmp_path / 'trace.jsonl'
  write_all(path, records)
  return path


def test_round_trip(records, path):
  traced = storage.read(path)
  assert traced.header == records[0]
  assert list(traced.prompts.values()) == records[1:3]
  assert traced.rows == [40, 7]
  iterations = sorted(
    (r for each in traced.iterations.values() for r in each),
    key=lambda r: r['iteration'],
  )
  assert iterations == records[3:-1]
  assert traced.summary == records[-1]
  assert not traced.is_truncated
  totals = traced.summarize()
  assert totals.num_tokens == records[-1]['num_tokens']
  assert (
    totals.num_tokens
    == traced.summarize(40).num_tokens + traced.summarize(7).num_tokens
  )


def test_every_cut_keeps_the_lines_before_it(records, path):
  data = path.read_bytes()
  first = data.index(b'\n') + 1
  for size in [first, first + 1, *range(first, len(data), 97), len(data) - 1]:
    path.write_bytes(data[:size])
    whole = data[:size].count(b'\n')
    is_complete = data[size : size + 1] == b'\n'
    traced = storage.read(path)
    num_records = (
      1
      + len(traced.prompts)
      + sum(map(len, traced.iterations.values()))
      + (traced.summary is not None)
    )
    assert num_records == whole + is_complete
    assert traced.is_truncated == (
      not is_complete and not data[:size].endswith(b'\n')
    )


def test_records_are_on_disk_before_the_run_ends(records, tmp_path):
  path = tmp_path / 'trace.jsonl'
  with path.open('w', encoding='utf-8', newline='\n') as file:
    for record in records[:4]:
      storage.write_record(file, record)
    assert path.read_bytes().count(b'\n') == 4
    traced = storage.read(path)
  assert traced.summary is None
  assert len(traced.prompts) == 2


def test_any_text_survives(records, tmp_path):
  text = 'a\u2028b\r\x00\ud83d"\\é'
  path = tmp_path / 'trace.jsonl'
  write_all(path, [records[0], {**records[1], 'text': text}])
  assert storage.read(path).prompts[40]['text'] == text


def test_refuses_to_write_nan():
  with pytest.raises(ValueError, match='JSON'):
    storage.write_record(
      io.StringIO(), {'type': 'summary', 'alpha': float('nan')}
    )


def _change(**fields):
  return lambda record: {**record, **fields}


def _drop(field):
  return lambda record: {k: v for k, v in record.items() if k != field}


def _change_token(**fields):
  def change(record):
    first, *others = record['drafted']
    return {**record, 'drafted': [{**first, **fields}, *others]}

  return change


# Which line is changed, how, and what the error says.
_ERRORS = [
  (1, _change(type='prompt'), 'first record; got a prompt'),
  (1, _change(version=2), 'version 2.*version 1'),
  (1, _drop('version'), 'version None'),
  (1, _drop('gamma'), "header lacks 'gamma'"),
  (1, _change(gamma=10**9), 'gamma 1000000000'),
  (1, _change(gamma=-1), 'gamma -1'),
  (1, _change(temperature='1'), "'temperature' = '1'"),
  (2, _change(type='header'), 'one header'),
  (2, _change(type='note'), "'note'"),
  (2, _drop('type'), 'None'),
  (2, _change(type=[]), r'\[\]'),
  (2, _change(row='a'), "'row' = 'a'"),
  (2, _change(row=True), "'row' = True"),
  (2, _change(num_encoder_tokens='3'), "'num_encoder_tokens' = '3'"),
  (2, lambda record: [record], 'None'),
  (4, _drop('next'), "iteration lacks 'next'"),
  (4, _change(committed=99), 'committed is 99'),
  (4, _change(drafted=[3]), 'token is an object'),
  (4, _change_token(verdict='maybe'), "verdict 'maybe'"),
  (4, _change_token(p='high'), "token has 'p' = 'high'"),
  (4, _change_token(p=float('nan')), 'NaN'),
  (4, _change_token(p=10**400), "token has 'p' = 1000"),
]


@pytest.mark.parametrize(('line', 'change', 'reason'), _ERRORS)
def test_errors_name_the_line(records, path, line, change, reason):
  lines = path.read_text().splitlines()
  if line == 4:
    line = 1 + next(
      i for i, text in enumerate(lines) if json.loads(text).get('drafted')
    )
  lines[line - 1] = json.dumps(change(json.loads(lines[line - 1])))
  path.write_text('\n'.join(lines) + '\n')
  with pytest.raises(ValueError, match=reason) as error:
    storage.read(path)
  assert str(error.value).startswith(f'{path}:{line}: ')


DEEP = b'[' * 200_000 + b']' * 200_000


def second_line(line: bytes):
  """Another second line."""

  def edit(contents: bytes) -> bytes:
    lines = contents.split(b'\n')
    lines[1] = line
    return b'\n'.join(lines)

  return edit


NO_RECORD = 'trace.jsonl:2: not a record of a trace'
DAMAGED = {
  'half a line': (
    second_line(b'{"type": "pro'),
    f'{NO_RECORD}: Unterminated string',
  ),
  'empty line': (second_line(b''), f'{NO_RECORD}: Expecting value'),
  'no UTF-8': (second_line(b'\xff'), "trace.jsonl:2: 'utf-8'"),
  'nested too deeply': (
    second_line(DEEP),
    'trace.jsonl:2: its lists are nested too deeply',
  ),
  # It is not taken for one that was cut.
  'last line nested too deeply': (lambda contents: contents + DEEP, 'nested'),
  'empty': (b'', 'no header'),
  'half a header': (b'{"type": "hea', 'no header'),
}


@pytest.mark.parametrize(('edit', 'message'), DAMAGED.values(), ids=DAMAGED)
def test_damaged_traces_are_refused(path, edit, message):
  edit_files(path.parent, {path.name: edit})
  with pytest.raises(ValueError, match=message):
    storage.read(path)
