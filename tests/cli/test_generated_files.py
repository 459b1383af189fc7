"""`specdec generate`: the files that it writes, also if it fails; and what it
says of the texts on a terminal."""

import itertools
import json

import pytest

from specdec_jax.assembly import recording
from specdec_jax.assembly import trace_files as storage
from specdec_jax.cli import outputs
from specdec_jax.cli.commands import generate as command
from specdec_jax.launch import progress
from tests.cli import tiny
from tests.cli.commands import DECODING_COMMANDS


def test_a_trace_records_a_batch(generate, tmp_path):
  path = tmp_path / 'trace.jsonl'
  records = generate(
    *('--json', '-', '--batch_size', '3', '--trace', path, '--seed', '5'),
    *('--gamma', '8'),
  ).records()
  traced = storage.read(path)
  assert traced.header['gamma'] == 8
  assert traced.header['temperature'] == 0
  assert (traced.header['seed'], traced.header['dtype']) == (5, 'float32')
  assert traced.header['drafter'] == 'prompt_lookup'
  assert (traced.header['lenience'], traced.header['verification']) == (
    1.0,
    'speculative_sampling',
  )
  # Nothing of the row that only fills the last batch.
  assert traced.rows == list(range(8))
  for row, record in enumerate(records):
    assert traced.prompts[row]['text'] == record['prompt']
    tokens = [
      token['token']
      for iteration in traced.iterations[row]
      for token in recording.committed(iteration)
    ]
    assert tokens == record['tokens']
    summary = traced.summarize(row)
    assert summary.num_target_runs == record['statistics']['target_runs']
    assert sum(summary.num_accepted) == record['statistics']['accepted']
  assert traced.summary['num_tokens'] == 64


@pytest.mark.parametrize('batch_size', ['1', '3'])
def test_colours_say_what_became_of_each_token(generate, tmp_path, batch_size):
  path = tmp_path / 'trace.jsonl'
  out = generate(
    *('--color', 'always', '--trace', path, '--batch_size', batch_size),
    *('--gamma', '8'),
  ).out
  verdicts = {
    token['verdict']
    for iterations in storage.read(path).iterations.values()
    for iteration in iterations
    for token in [*iteration['drafted'], iteration['next'] or {'verdict': ''}]
  }
  assert {'accepted', 'rejected', 'correction'} <= verdicts
  for style in ('\x1b[32m', '\x1b[9;31m', '\x1b[1;34m'):
    assert style in out
  # Each row stands under its prompt.
  prompts = [f'> {line["text"]}' for line in storage.read(path).prompts
             .values()]  # fmt: skip
  shown = tiny.without_styles(out).splitlines()
  assert [line for line in shown if line.startswith('> ')] == prompts


def test_without_colour_marks_say_it(generate, monkeypatch):
  monkeypatch.setenv('FORCE_COLOR', '1')
  monkeypatch.setenv('NO_COLOR', '1')
  out = generate('--drafter', 'uniform', '--gamma', '1').out
  assert '[-' in out
  assert '{+' in out
  assert '\x1b[31' not in out
  assert ';31m' not in out


@pytest.fixture
def fail_at(monkeypatch):
  """Makes the given batch of the next command, from 1, raise an error."""
  results = command._results

  def arrange(number, error):
    calls = itertools.count(1)

    def failing(*args):
      if next(calls) == number:
        raise error
      return results(*args)

    monkeypatch.setattr(command, '_results', failing)

  return arrange


@pytest.mark.parametrize(
  ('error', 'status', 'said'),
  [
    (ValueError('the third batch is cursed'), 2, 'cursed'),
    (KeyboardInterrupt(), 130, 'specdec: interrupted\n'),
  ],
)
def test_rows_decoded_before_an_error_are_kept(
  run, model, prompts_file, tmp_path, fail_at, error, status, said
):
  path = tmp_path / 'out.jsonl'
  fail_at(3, error)
  usual = ('--model', model, '--prompts', prompts_file, '--batch_size', '2')
  result = run(
    'generate', *usual, '--max_new_tokens', '4', '--json', path,
    '--trace', tmp_path / 'trace',
  )  # fmt: skip
  assert result.status == status
  assert said in result.err
  lines = tiny.begun(path).read_text().splitlines()
  assert len(lines) == 4
  assert result.out == ''.join(json.loads(x)['text'] + '\n' for x in lines)
  traced = storage.read(tiny.begun(tmp_path / 'trace'))
  assert traced.summary is None
  assert set(range(4)) <= set(traced.rows)


def test_old_results_stay_until_there_are_new_ones(
  run, model, prompts_file, tmp_path, fail_at
):
  json_path, trace_path = tmp_path / 'out.jsonl', tmp_path / 'trace.jsonl'
  link = tmp_path / 'link.jsonl'
  link.symlink_to(json_path)
  for path in (json_path, trace_path):
    path.write_text('of hours\n')
  json_path.chmod(0o640)
  call = lambda *options: run(
    'generate', '--model', model, '--prompts', prompts_file,
    '--max_new_tokens', '4', '--json', link, '--trace', trace_path, *options,
  )  # fmt: skip
  for number, kept in ((1, 0), (3, 2)):
    fail_at(number, ValueError('this batch is cursed'))
    assert call().status == 2
    assert json_path.read_text() == trace_path.read_text() == 'of hours\n'
    begun = list(tmp_path.glob('out.jsonl.partial-*'))
    assert [len(p.read_text().splitlines()) for p in begun] == [kept] * bool(
      kept
    )
  fail_at(0, None)  # No batch has the number 0.
  result = call()
  assert (result.status, result.err) == (0, '')
  assert len(json_path.read_text().splitlines()) == 8
  assert link.is_symlink()
  assert json_path.stat().st_mode & 0o777 == 0o640
  assert storage.read(trace_path).summary is not None


def test_a_file_has_one_writer(run, model, tmp_path):
  path = tmp_path / 'out.json'
  usual = ('--model', model, '--prompt', 'ab', '--max_new_tokens', '8')
  with outputs.reserved(str(path)):
    # A process that is killed now leaves nothing beside its results.
    assert list(tmp_path.iterdir()) == []
    for command in DECODING_COMMANDS:
      result = run(command, *usual, '--json', path)
      tiny.assert_refused(result, 'is writing', str(path))
    assert run('generate', *usual, '--json', '/dev/null').status == 0
  assert list(tmp_path.iterdir()) == []


def test_the_last_line_says_how_texts_ended(run, model, monkeypatch, tmp_path):
  monkeypatch.setattr(progress, 'is_watched', lambda: True)
  usual = ('generate', '--model', model, '--max_new_tokens', '8')
  told = run(*usual, '--prompt', 'ab')
  assert told.err.endswith(' tokens/s; ended at the token limit\n')
  path = tmp_path / 'prompts.jsonl'
  path.write_text(
    json.dumps({'prompt': 'ab'}) + '\n'
    + json.dumps({'prompt': 'ab', 'stop': [told.out[1:3]]}) + '\n'
  )  # fmt: skip
  told = run(*usual, '--prompts', path)
  expected = '; 1 ended at EOS or a stop string, 1 ended at the token limit\n'
  assert told.err.endswith(expected)
  assert outputs.ending(['nan']) == 'ended where no token could be drawn'
