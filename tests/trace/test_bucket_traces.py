"""Traces that are written to a bucket, and shown from there."""

import pytest

pytest.importorskip('sentencepiece')

from tests.cli.tiny import run_well
from tests.files.test_bucket_failures import told


@pytest.mark.slow
def test_traces_and_prompts(server, bucket, tmp_path, capfd):
  prompts = tmp_path / 'prompts.txt'
  prompts.write_text('Open the file.\n')
  there = server.upload(prompts, f'{bucket}/prompts.txt')
  command = ('generate', '--model=ende-nano', '--drafter=uniform',
             '--max_new_tokens=8', '--gamma=2')  # fmt: skip
  shown = []
  for source, trace in (
    (prompts, tmp_path / 'trace.jsonl'),
    (there, f'{bucket}/trace.jsonl'),
  ):
    run_well(capfd, *command, '--prompts', source, '--trace', trace)
    shown.append(run_well(capfd, 'trace', trace))
    run_well(capfd, 'trace', trace, '--html', f'{trace}.html')
  assert shown[0] == shown[1]
  objects = server.objects(bucket)
  assert set(objects) == {'prompts.txt', 'trace.jsonl', 'trace.jsonl.html'}
  local = (tmp_path / 'trace.jsonl').read_bytes()
  assert objects['trace.jsonl'].count(b'\n') == local.count(b'\n')


def test_a_trace_that_is_not_in_the_bucket(bucket, capfd):
  assert told(capfd, 'trace', f'{bucket}/t') == (
    f'{bucket}/t: No such file or directory'
  )
