"""Where batches come from."""

import json
import pathlib

import numpy as np
import pytest

from specdec_jax.text import tasks
from specdec_jax.training.data import datasets, token_files
from specdec_jax.training.data.datasets import Dataset
from tests.training import tiny_runs

MODEL = pathlib.Path(__file__).parent.parent / 'golden' / 't5x/tiny_sp.model'


def constant(value):
  return Dataset(batch=lambda position: {'x': np.array([value, position])})


def test_a_mixture_has_its_ratios_and_forgets_nothing():
  mixed = datasets.mix([constant(0), constant(1)], [0.25, 0.75], seed=3)
  drawn = [mixed.batch(position)['x'] for position in range(2000)]
  assert [x[1] for x in drawn] == list(range(2000))
  # Three standard deviations of the share are 0.029.
  assert np.mean([x[0] for x in drawn]) == pytest.approx(0.75, abs=0.04)
  np.testing.assert_array_equal(mixed.batch(7)['x'], drawn[7])


@pytest.mark.parametrize(
  ('ratios', 'message'), [([0.5, 0.5], '1 data sets'), ([0.5], 'sum to 1')]
)
def test_wrong_ratios_are_refused(ratios, message):
  with pytest.raises(ValueError, match=message):
    datasets.mix([constant(0)], ratios)


def test_token_files_may_be_cut_short(tmp_path):
  token_files.save(tmp_path / 'train.npz', tiny_runs.examples(50))
  settings = {'batch_size': 2, 'lengths': tiny_runs.LENGTHS}
  whole = datasets.from_token_files(str(tmp_path), **settings)
  few = datasets.from_token_files(str(tmp_path), max_examples=8, **settings)
  assert whole.validation is None
  first = few.batch(0)['decoder_target_tokens']
  assert first.shape == (2, 16)
  # Each example ends in its EOS, and 8 of them are all there are.
  rows = datasets.from_tokens(
    [tiny_runs.examples(50)], max_examples_per_row=1, **settings
  )
  assert (rows.batch(0)['decoder_target_tokens'] == tiny_runs.EOS).sum() == 2


def test_folders_of_several_tasks_are_mixed(tmp_path):
  """Every example of each comes once an epoch."""
  settings = {'batch_size': 1, 'lengths': tiny_runs.LENGTHS}
  counts = {'a': 24, 'b': 8}
  for name, count in counts.items():
    (tmp_path / name).mkdir()
    token_files.save(tmp_path / name / 'train.npz', tiny_runs.examples(count))
  token_files.save(tmp_path / 'b' / 'validation.npz', tiny_runs.examples(3))
  folders = [str(tmp_path / name) for name in counts]
  mixed = datasets.from_token_files(folders, max_examples_per_row=1, **settings)
  texts = {name: [] for name in counts}
  for name in counts:
    alone = tiny_runs.examples(counts[name])
    texts[name] = [alone.targets[i].tolist() for i in range(len(alone))]
  found = []
  for position in range(sum(counts.values())):
    row = mixed.batch(position)['decoder_target_tokens'][0]
    found.append(row[row > 0].tolist())
  assert sorted(found) == sorted(texts['a'] + texts['b'])
  assert mixed.validation is not None
  assert len(list(mixed.validation())) == 3
  # Those of one task without inputs cannot be mixed in.
  plain = token_files.from_rows(None, [[5, 1]])
  token_files.save(tmp_path / 'b' / 'train.npz', plain)
  with pytest.raises(ValueError, match='all have inputs'):
    datasets.from_token_files(folders, **settings)


def test_the_vocabulary_comes_with_the_token_files(tmp_path):
  settings = {'batch_size': 1, 'lengths': tiny_runs.LENGTHS}
  folders = [tmp_path / name for name in 'ab']
  for folder in folders:
    tiny_runs.write_tokens(folder, train=8)
  names = [str(folder) for folder in folders]
  found = datasets.from_token_files(names, **settings)
  assert found.vocabulary == folders[0] / token_files.VOCABULARY
  other = found._replace(vocabulary=folders[1] / token_files.VOCABULARY)
  assert datasets.mix([found, other], [0, 1]).vocabulary == found.vocabulary
  with pytest.raises(ValueError, match='several vocabularies'):
    datasets.mix([found, found._replace(vocabulary=MODEL)], [0, 1])


def test_folders_without_token_files_of_one_vocabulary_are_refused(tmp_path):
  settings = {'batch_size': 1, 'lengths': tiny_runs.LENGTHS}
  folders = [tmp_path / name for name in 'ab']
  for folder in folders:
    tiny_runs.write_tokens(folder, train=8)
  names = [str(folder) for folder in folders]
  description = folders[1] / token_files.DESCRIPTION
  digest = token_files.sha256_of(tiny_runs.vocabulary())
  description.write_text(description.read_text().replace(digest, '0123456789'))
  told = f'{folders[1]}: .* vocabulary 0123456789'
  with pytest.raises(ValueError, match=told):
    token_files.find_vocabulary(folders[1:])
  with pytest.raises(ValueError, match=r'several vocabularies: .* 0123456789'):
    datasets.from_token_files(names, **settings)
  (folders[0] / 'train.npz').unlink()
  with pytest.raises(ValueError, match='there is no'):
    datasets.from_token_files(names[:1], **settings)
  with pytest.raises(ValueError, match='there are no token files'):
    datasets.from_token_files([], **settings)


def test_a_file_of_text_is_a_task(tmp_path):
  pytest.importorskip('sentencepiece')
  path = tmp_path / 'pairs.jsonl'
  long = 'the house jumps two nine ' * 9
  pairs = [('the house', 'two'), (long, 'nine'), ('two', long)] * 4
  path.write_text(
    ''.join(
      json.dumps({'inputs': source, 'targets': target}) + '\n'
      for source, target in pairs
    )
  )
  settings = {'vocabulary': str(MODEL), 'batch_size': 2}
  settings['lengths'] = {'inputs': 16, 'targets': 8}
  found = datasets.from_task(str(path), validation_name=str(path), **settings)
  assert found.validation is not None
  counts = np.zeros(2, int)
  for rows in found.validation():
    for i, side in enumerate(('encoder_input', 'decoder_target')):
      ends = (rows[f'{side}_tokens'] == 1).sum()
      # What was trimmed ends in EOS, too.
      segments = rows[f'{side.split("_")[0]}_segment_ids']
      assert ends == segments.max(axis=1).sum()
      counts[i] += ends
  assert counts.tolist() == [12, 12]
  assert found.batch(0)['decoder_target_tokens'].shape == (2, 8)
  path.write_text('{"inputs": "the house"}\n')
  with pytest.raises(ValueError, match=r'example 1.*no targets'):
    datasets.from_task(str(path), **settings)
  # A text is learnt line by line.
  text = tmp_path / 'text.txt'
  text.write_text('the house\n' * 6)
  learnt = datasets.from_task(str(text), extra_ids=100, **settings)
  assert learnt.extra_ids == 100
  assert 'encoder_input_tokens' not in learnt.batch(0)


def test_tokens_that_a_task_gives_are_refused(monkeypatch):
  example = tasks.Example(inputs='a b', targets='c', input_ids=(7, 1))
  task = tasks.Task(name='spans', read=lambda: iter([example]))
  monkeypatch.setattr(tasks, 'find', lambda *args, **options: task)
  with pytest.raises(ValueError, match='spans has tokens'):
    datasets.from_task(
      'spans', vocabulary=str(MODEL), batch_size=2, lengths={'targets': 8}
    )
