"""Other systems beside this one: rates, what is the same, and processes."""

import numpy as np
import pytest

from experiments.peers import __main__ as peers
from experiments.peers import processors, systems, workers
from tests.cli import tiny


def test_a_rate_is_of_median_turns():
  # A turn that was held up counts for nothing.
  seconds = np.array([[1.0, 9.0, 1.0], [2.0, 2.0, 2.0]])
  assert peers.rate(seconds, [[5, 6, 7], [1, 2, 3]]) == 2.0


def test_speeds_are_over_plain_and_tokens_beside_the_reference():
  rates = {
    ('specdec_jax, float32', 'none'): 30.0,
    ('specdec_jax, float32', 'prompt_lookup'): 90.0,
    ('specdec_jax, bfloat16', 'none'): 60.0,
    ('transformers, float32', 'none'): 20.0,
  }
  tokens = {
    ('specdec_jax, float32', 'none'): [[1, 2], [3]],
    ('specdec_jax, float32', 'prompt_lookup'): [[1, 2], [3]],
    ('specdec_jax, bfloat16', 'none'): [[1, 2], [4]],
    ('transformers, float32', 'none'): [[1, 2], [3]],
  }
  rows = peers.compare(rates, tokens)
  assert [row['over its own plain'] for row in rows] == [
    *('1.00', '3.00', '1.00', '1.00')
  ]
  # The faster dtype of ours.
  assert [row['over our plain'] for row in rows] == [
    *('0.50', '1.50', '1.00', '0.33')
  ]
  assert [row['same tokens'] for row in rows] == [
    *('2 of 2', '2 of 2', '1 of 2', '2 of 2')
  ]
  del rates['transformers, float32', 'none']
  del tokens['transformers, float32', 'none']
  assert peers.compare(rates, tokens)[0]['same tokens'] == ''


def test_a_system_that_cannot_be_had_is_named(tmp_path):
  task = systems.Task(
    model='m',
    draft_model=None,
    folder=tmp_path,
    texts=['a'],
    is_chat=False,
    num_new=2,
    gamma=1,
  )
  # Without its package, or with it and without weights.
  with pytest.raises(ValueError, match=r'^transformers: \w+Error'):
    workers.start(
      'transformers', systems.transformers, task, 'float32', [[1]], [0]
    )


def test_a_process_that_has_ended_can_be_closed():
  context = workers.multiprocessing.get_context('spawn')
  here, there = context.Pipe()
  there.close()
  process = context.Process(target=print)
  process.start()
  facts = {'version': '', 'ways': (), 'ids': (), 'eos_ids': ()}
  workers.Worker(name='a', connection=here, process=process, **facts).close()


def test_unknown_systems_are_refused(capsys):
  with pytest.raises(SystemExit):
    peers.main(['--systems', 'vllm'])
  assert "invalid choice: 'vllm'" in capsys.readouterr().err


@pytest.mark.slow
def test_ways_that_share_batches_have_the_tokens_of_their_own(
  monkeypatch, tmp_path
):
  ways = {
    'none': {},
    'one': {'no_repeat_ngram_size': 1},
    'other': {'suppress_tokens': [*range(4, 60)]},
  }
  task = systems.Task(
    model=tiny.write_model(tmp_path / 'tiny'),
    draft_model=None,
    folder=tmp_path,
    texts=['the in ab', 'ab'],
    is_chat=True,
    num_new=6,
    gamma=2,
  )
  monkeypatch.setattr(processors, 'WAYS', ways)
  ids, _, found = processors._ours(task, batch_size=6)
  assert len(ids) == 2 < len(ids[1]) < len(ids[0])
  assert all(len({*tokens}) == len(tokens) for tokens in found['one'])
  suppressed = {*ways['other']['suppress_tokens']}
  assert all(suppressed.isdisjoint(tokens) for tokens in found['other'])
  assert not all(suppressed.isdisjoint(tokens) for tokens in found['none'])
  for name, way in ways.items():
    monkeypatch.setattr(processors, 'WAYS', {name: way})
    assert processors._ours(task, batch_size=1)[2] == {name: found[name]}


def test_what_a_processor_changes_is_counted():
  theirs = {'none': [[1, 2], [3]], 'a': [[1, 2], [4]]}
  assert processors._row('a', [[1, 5], [4]], theirs) == {
    'processor': 'a',
    'same tokens': '1 of 2',
    'texts that it changes': '1',
  }
