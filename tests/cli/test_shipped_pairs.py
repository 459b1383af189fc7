"""Pairs that come with the package, by their names on the command line."""

import json

import pytest

pytest.importorskip('sentencepiece')

from specdec_jax.checkpoints import pretrained

PAIRS = [
  (f'{task}-mini', f'{task}-nano')
  for task in ('ende', 'lm')
  if {f'{task}-mini', f'{task}-nano'} <= set(pretrained.names())
]


@pytest.mark.parametrize(('target', 'drafter'), PAIRS)
def test_a_pair_decodes_by_name(run, tmp_path, target, drafter):
  """What the drafter changes is the number of target runs, not the text."""
  (tmp_path / 'prompts.txt').write_text(
    'A small text editor for\nThis package contains the\n'
    'summarize: This package contains the manual of the editor.\n'
  )
  records = []
  for drafting in (('--draft_model', drafter), ('--drafter', 'none')):
    result = run(
      *('generate', '--model', target, *drafting, '--gamma', 3),
      *('--prompts', tmp_path / 'prompts.txt', '--batch_size', 3),
      *('--max_new_tokens', 20, '--json', tmp_path / 'out.jsonl'),
    )
    assert result.status == 0, result
    lines = (tmp_path / 'out.jsonl').read_text().splitlines()
    records.append([json.loads(line) for line in lines])
  drafted, plain = records
  assert [r['tokens'] for r in drafted] == [r['tokens'] for r in plain]
  assert all(record['text'] for record in drafted)
  runs = [sum(r['statistics']['target_runs'] for r in rs) for rs in records]
  assert runs[0] < runs[1]
