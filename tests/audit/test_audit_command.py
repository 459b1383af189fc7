"""`specdec audit`: what users decode, against the target's own calls."""

import json
import re

import pytest

import specdec_jax
from specdec_jax.assembly import running
from specdec_jax.audit import decoder_audit as auditing
from tests.cli import tiny
from tests.cli.tiny import assert_refused


@pytest.fixture
def audit(run, model, tmp_path):
  prompts = tmp_path / 'prompts.txt'
  prompts.write_text('the in the in the in\nab ab ab\n')

  def call(*options):
    return run(
      *('audit', '--model', model, '--prompts', prompts),
      *('--drafter', 'prompt_lookup', '--gamma', '2', '--max_new_tokens', '2'),
      *('--num_draws', '320', *options),
    )

  return call


def test_samples_follow_the_model_and_lenient_ones_do_not(audit, tmp_path):
  path = tmp_path / 'audit.json'
  result = audit('--top_k', '4', '--json', str(path))
  assert result.status == 0, result.err
  assert result.out.startswith('not rejected')
  assert '| prompt 1, sequences, seed 1 |' in result.out
  figures = json.loads(path.read_text('utf-8'))
  assert figures['kind'] == 'specdec audit'
  assert all(check['detectable'] < 0.4 for check in figures['checks'])
  result = audit('--lenience', '0.01', '--temperature', '3')
  assert result.status == 1
  assert result.out.startswith('REJECTED')


def test_limits_are_judged_in_float32(audit):
  """In bfloat16 a call of another width has other tokens at the edge."""
  half = ('--dtype', 'bfloat16')
  refused = audit(*half, '--top_p', '0.9')
  assert_refused(refused, 'bfloat16 moves the edge of top_p', 'float32')
  assert audit(*half, '--num_draws', '64').err == ''


def test_logits_that_are_no_tokens_have_no_mass(tmp_path):
  size = len(tiny.make_tokens())
  padded = tiny.write_model(tmp_path / 'padded', vocab_size=2 * size)
  decoder = specdec_jax.load(
    padded, drafter='prompt_lookup', gamma=2, temperature=1.0
  )
  settings = running.DecodeSettings(max_new_tokens=1)
  _, next_probs = auditing.engine(decoder, ['the in ab'], settings)
  probs = next_probs((0,))
  assert probs.shape == (2 * size,)
  assert not probs[size:].any()


def test_settings_of_one_line_are_not_ignored(run, tmp_path):
  path = tmp_path / 'prompts.jsonl'
  path.write_text('{"prompt": "a"}\n{"prompt": "b", "top_k": 3}\n')
  words = 'prompts.jsonl, line 2: only generate reads top_k of a line'
  assert_refused(run('audit', '--prompts', path), words)
  write = ('data', 'write', '--model', 'x', '--out', tmp_path / 'out')
  assert_refused(run(*write, '--prompts', path), words)


def test_what_is_read_is_not_overwritten(audit, tmp_path):
  path = tmp_path / 'text.txt'
  path.write_text('the in the in')
  same = ('--drafter', 'ngram', '--ngram_text', path, '--json', path)
  assert_refused(audit(*same), '--ngram_text and --json')


def test_greedy_tokens_are_for_bench(audit):
  assert_refused(audit('--temperature', '0'), 'bench')


def test_how_far_it_is(audit, monkeypatch):
  """Both bars end where they should."""
  monkeypatch.setenv('SPECDEC_PROGRESS', '0.001')
  err = audit('--num_draws', '64', '--top_k', '4').err
  for title, total in ('drawing', '256'), ('comparing', r'\d+'):
    found = re.findall(rf'{title}: (\d+) of ({total})(?:, | |\n)', err)
    assert found, err
    assert int(found[-1][0]) <= int(found[-1][1])
