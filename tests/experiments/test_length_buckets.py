"""Batches of like lengths: nothing lost, nothing twice, resumable."""

import numpy as np
import pytest

from experiments.xia2023 import batches
from specdec_jax.training.data import token_files

LIMITS = (4, 8, 16)


@pytest.fixture(scope='module')
def examples():
  rng = np.random.default_rng(0)
  lengths = rng.integers(1, 17, (200, 2))
  # The first tokens name the example.
  inputs = [[i + 20, *[3] * (n - 1)] for i, (n, _) in enumerate(lengths)]
  targets = [[i + 20, *[4] * (n - 1)] for i, (_, n) in enumerate(lengths)]
  return inputs, targets


@pytest.fixture(scope='module')
def folder(examples, tmp_path_factory):
  path = tmp_path_factory.mktemp('tokens')
  token_files.save(path / 'train.npz', token_files.from_rows(*examples))
  first = [side[:30] for side in examples]
  token_files.save(path / 'validation.npz', token_files.from_rows(*first))
  return path


def made(folder, **options):
  return batches.from_length_buckets(
    str(folder), batch_tokens=32, limits=LIMITS, **options
  )


def names(features) -> list[int]:
  first = features['decoder_target_tokens'][:, 0]
  return (first[first > 0] - 20).tolist()


def test_an_epoch_has_every_batch_once(folder, examples):
  dataset = made(folder)
  sizes = {4: 8, 8: 4, 16: 2}
  lengths = np.maximum(*[[len(row) for row in side] for side in examples])
  buckets = np.array(LIMITS)[np.searchsorted(LIMITS, lengths)]
  num_batches = sum((buckets == limit).sum() // n for limit, n in sizes.items())
  seen, widths = [], []
  for position in range(num_batches):
    features = dataset.batch(position)
    width = features['decoder_target_tokens'].shape[1]
    assert features['encoder_input_tokens'].shape == (sizes[width], width)
    assert features['decoder_segment_ids'].max() == 1
    assert all(buckets[i] == width for i in names(features))
    seen += names(features)
    widths.append(width)
  assert len(seen) == len(set(seen)) >= 200 - 8 - 4 - 2
  assert widths != sorted(widths)
  second = [names(dataset.batch(num_batches + i)) for i in range(num_batches)]
  assert second != [names(dataset.batch(i)) for i in range(num_batches)]


def test_a_position_is_the_whole_state(folder):
  first, second = made(folder), made(folder)
  for position in (57, 3):
    for name, values in first.batch(position).items():
      np.testing.assert_array_equal(values, second.batch(position)[name])
  other = made(folder, seed=1)
  assert any(names(first.batch(i)) != names(other.batch(i)) for i in range(4))


def test_validation_has_each_example_once(folder):
  seen = [i for features in made(folder).validation() for i in names(features)]
  assert sorted(seen) == list(range(30))


def test_examples_of_several_folders_are_mixed(folder, examples, tmp_path):
  halves = [[side[i::2] for side in examples] for i in (0, 1)]
  for name, half in zip('ab', halves, strict=True):
    (tmp_path / name).mkdir()
    token_files.save(
      tmp_path / name / 'train.npz', token_files.from_rows(*half)
    )
  paths = [str(tmp_path / name) for name in 'ab']
  dataset = batches.from_length_buckets(
    paths, batch_tokens=32, limits=LIMITS, seed=0
  )
  seen = [i for position in range(40) for i in names(dataset.batch(position))]
  assert {i % 2 for i in seen} == {0, 1}
  assert len(seen) == len(set(seen)) > 60
  assert dataset.validation is None


@pytest.mark.parametrize(
  ('batch_tokens', 'limits', 'message'),
  [
    (32, (4, 8), 'room for 8'),
    (32, (8, 4), 'should ascend'),
    (15, LIMITS, 'row of 16'),
  ],
)
def test_what_does_not_fit_is_refused(folder, batch_tokens, limits, message):
  with pytest.raises(ValueError, match=message):
    batches.from_length_buckets(
      str(folder), batch_tokens=batch_tokens, limits=limits
    )
