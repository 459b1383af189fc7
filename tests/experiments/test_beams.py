"""The tables of speculative beam search, on a pair of one model twice."""

import dataclasses
import json

import jax
import pytest

from experiments.beams import __main__ as beams
from experiments.beams import ways
from experiments.leviathan2023 import pairs
from specdec_jax.launch import compilation_cache
from specdec_jax.models import presets
from tests.experiments.tiny import TINY

pytest.importorskip('tokenizers')


@pytest.fixture
def argv(tmp_path, monkeypatch):
  monkeypatch.setitem(presets.PRESETS, 'tiny', TINY)
  monkeypatch.setattr(compilation_cache, 'enable', lambda: None)
  ende = pairs.KINDS['ende']
  short = {**vars(ende), 'inputs_length': 12, 'targets_length': 6}
  monkeypatch.setitem(pairs.KINDS, 'ende', pairs.Kind(**short))
  before = jax.config.read('jax_disable_most_optimizations')
  jax.config.update('jax_disable_most_optimizations', True)
  task = tmp_path / 'test.jsonl'
  lines = [json.dumps({'inputs': f'number {i}', 'targets': 'x'}) for i in 'abc']
  task.write_text('\n'.join(lines) + '\n')
  counts = ('batch_size=2', 'num_timed=2', 'repeats=1', 'gamma=2', 'copied=2')
  yield [
    f'--pair=ende:random:tiny:random:tiny:{task}',
    f'--output={tmp_path}',
    '--beams=2',
    '--gammas=2',
    *(f'--{count}' for count in counts),
  ]
  jax.config.update('jax_disable_most_optimizations', before)


@pytest.mark.slow
def test_one_model_twice_saves_calls_and_changes_no_beam(
  argv, tmp_path, capsys, monkeypatch
):
  assert beams.main(argv) == 0, capsys.readouterr().err
  equality = json.loads((tmp_path / 'equality.json').read_text())
  none, model, copied = equality['rows']
  for row in equality['rows']:
    assert row['examples'] == 3
    assert row['examples with a difference'] == row['float ties']
  assert none['drafter'] == ways.NONE
  assert none['steps per call'] == 1 <= copied['steps per call']
  # Three steps a call, or what is left of six.
  assert model['target calls'] == model['target calls of beam search'] / 3
  assert model['levels followed'] == 1
  speed = json.loads((tmp_path / 'speed.json').read_text())
  assert [row['drafter'] for row in speed['rows']] == [
    *(ways.PLAIN, ways.NONE, 'random:tiny', 'copied')
  ]
  # It is all there.
  monkeypatch.setattr(beams, '_compiled_late', lambda *args: None)
  assert beams.main(argv) == 0, capsys.readouterr().err
  again = json.loads((tmp_path / 'equality.json').read_text())
  assert again['rows'] == equality['rows']
  assert 'contrib' in again['code']
  # But not that of other texts, or of other code.
  task = tmp_path / 'test.jsonl'
  texts = task.read_text()
  task.write_text(texts.replace('number a', 'number d'))
  with pytest.raises(TypeError):
    beams.main(argv)
  task.write_text(texts)
  monkeypatch.setattr(beams.provenance, 'code', lambda *more: 'contrib 0')
  with pytest.raises(TypeError):
    beams.main(argv)


@pytest.mark.slow
def test_the_least_gap_is_that_of_two_nearly_equal_sequences(argv):
  """Of random weights there is some gap, and of weights of zero none."""
  pair = pairs.load(argv[0].removeprefix('--pair='), None, 0)
  prompt = beams.common.pack(pair.layout, pair.rows[:1], 1)
  assert 0 < ways.smallest_gap(pair, prompt, 2, 0.6) < 1
  zeros = jax.tree.map(lambda x: 0 * x, pair.target.params)
  flat = dataclasses.replace(
    pair, target=dataclasses.replace(pair.target, params=zeros)
  )
  assert ways.smallest_gap(flat, prompt, 2, 0.6) == 0
