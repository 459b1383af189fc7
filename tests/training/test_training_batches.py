"""Packed rows and the order that they come in."""

import numpy as np
import pytest

from specdec_jax.training.data import token_files, training_batches

SHAPE = {'input_length': 64, 'target_length': 48}


@pytest.fixture(scope='module')
def tokens():
  generator = np.random.default_rng(0)

  def rows(longest):
    lengths = generator.integers(1, longest, 500)
    return [[*generator.integers(2, 9_000, n - 1), 1] for n in lengths]

  return token_files.from_rows(rows(24), rows(16))


@pytest.fixture(scope='module')
def rows(tokens):
  return training_batches.pack(tokens, **SHAPE)


def examples(rows):
  """Inputs and targets of every segment, from the features alone."""
  found = []
  for row in range(training_batches.num_rows(rows)):
    segments = rows['decoder_segment_ids'][row]
    for segment in range(1, segments.max(initial=0) + 1):
      sides = []
      for side, name in (('encoder', 'input'), ('decoder', 'target')):
        is_its = rows[f'{side}_segment_ids'][row] == segment
        sides.append(tuple(rows[f'{side}_{name}_tokens'][row][is_its]))
        positions = rows[f'{side}_positions'][row][is_its]
        assert positions.tolist() == list(range(is_its.sum()))
      inputs = rows['decoder_input_tokens'][row][segments == segment]
      assert tuple(inputs) == (0, *sides[1][:-1])
      found.append(tuple(sides))
  return found


def test_every_example_is_in_one_row(tokens, rows):
  expected = [
    (tuple(tokens.inputs[i]), tuple(tokens.targets[i]))
    for i in range(len(tokens))
  ]
  assert sorted(examples(rows)) == sorted(expected)
  weights = rows['decoder_loss_weights']
  assert weights.sum() == tokens.targets.tokens.size
  assert ((rows['decoder_target_tokens'] > 0) == (weights > 0)).all()


def test_rows_are_well_filled(tokens, rows):
  sizes = tokens.inputs.tokens.size, tokens.targets.tokens.size
  fewest = max(sizes[0] / 64, sizes[1] / 48)
  assert training_batches.num_rows(rows) < 1.1 * fewest
  alone = training_batches.pack(tokens, **SHAPE, max_examples=1)
  assert training_batches.num_rows(alone) == len(tokens)
  assert alone['decoder_segment_ids'].max() == 1


def test_a_language_model_has_no_encoder(tokens):
  rows = training_batches.pack(
    token_files.from_rows(None, [[5, 6, 1], [7, 1]]),
    input_length=1,
    target_length=6,
  )
  assert not [name for name in rows if name.startswith('encoder')]
  assert sorted(rows['decoder_target_tokens'][0]) == [0, 1, 1, 5, 6, 7]


def test_examples_longer_than_a_row(tokens):
  with pytest.raises(ValueError, match=r'23 inputs tokens, .* room for 9'):
    training_batches.pack(tokens, input_length=9, target_length=16)


def same(a, b):
  return all((a[name] == b[name]).all() for name in a)


def epochs(rows, batch_size=8, **options):
  group = training_batches.Group(rows, batch_size)
  return training_batches.epochs([group], **options)


def test_an_epoch_has_every_row_at_most_once(rows):
  stream = epochs(rows)
  count = training_batches.num_rows(rows) // 8
  for epoch in range(2):
    seen = []
    for position in range(epoch * count, (epoch + 1) * count):
      seen += examples(stream(position))
    assert len(set(seen)) == len(seen)
    left_over = training_batches.num_rows(rows) - 8 * count
    assert len(seen) >= 500 - left_over * 48
  assert not same(stream(0), stream(count))


def test_the_stream_resumes_at_a_position(tokens, rows):
  again = training_batches.pack(tokens, **SHAPE)
  assert same(rows, again)
  before, after = epochs(rows, seed=5), epochs(again, seed=5)
  for position in (3, 17, 1_000_003):
    assert same(before(position), after(position))
  assert not same(before(3), epochs(rows, seed=6)(3))


def test_evaluation_sees_every_row_once(tokens, rows):
  group = training_batches.Group(rows, 32)
  batches = list(training_batches.in_order([group]))
  assert {b['decoder_target_tokens'].shape for b in batches} == {(32, 48)}
  found = [example for batch in batches for example in examples(batch)]
  assert sorted(found) == sorted(examples(rows))


def test_too_few_rows(rows):
  with pytest.raises(ValueError, match='not one full batch'):
    epochs(rows, batch_size=5000)
