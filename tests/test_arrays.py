"""Ragged rows against loops in plain numpy."""

import jax.numpy as jnp
import numpy as np
import pytest

from specdec_jax import arrays

BUFFER = np.arange(30, dtype=np.int32).reshape(3, 10)


def _int32(*values):
  return jnp.array(values, jnp.int32)


def test_block_positions():
  positions = arrays.block_positions(_int32(4, 0, 7), 3)
  np.testing.assert_array_equal(positions, [[4, 5, 6], [0, 1, 2], [7, 8, 9]])
  assert positions.dtype == jnp.int32


@pytest.mark.parametrize('width', [1, 3, 10])
def test_read_block(width):
  starts = [0, 4, 10 - width]
  block = arrays.read_block(jnp.asarray(BUFFER), _int32(*starts), width)
  for row, start in enumerate(starts):
    # Beyond the end, the last element again.
    columns = np.minimum(np.arange(start, start + width), 9)
    np.testing.assert_array_equal(block[row], BUFFER[row, columns])


def test_read_block_outside_repeats_the_edge():
  block = arrays.read_block(jnp.asarray(BUFFER), _int32(-2, 8, 12), 3)
  np.testing.assert_array_equal(block, [[0, 0, 0], [18, 19, 19], [29, 29, 29]])


def test_write_block_against_a_loop():
  rng = np.random.default_rng(0)
  for _ in range(50):
    width = int(rng.integers(1, 6))
    starts = rng.integers(-2, 12, 3)
    counts = rng.integers(0, width + 1, 3)
    block = rng.integers(100, 200, (3, width)).astype(np.int32)
    expected = BUFFER.copy()
    for row in range(3):
      for i in range(counts[row]):
        if 0 <= starts[row] + i < 10:
          expected[row, starts[row] + i] = block[row, i]
    written = arrays.write_block(
      jnp.asarray(BUFFER),
      jnp.asarray(block),
      _int32(*starts),
      _int32(*counts),
    )
    np.testing.assert_array_equal(written, expected)


def test_write_block_keeps_the_buffers_dtype():
  written = arrays.write_block(
    jnp.zeros((1, 4), jnp.float32),
    jnp.ones((1, 2), jnp.bfloat16),
    _int32(1),
    _int32(2),
  )
  assert written.dtype == jnp.float32
  np.testing.assert_array_equal(written, [[0, 1, 1, 0]])


def test_is_within():
  within = arrays.is_within(_int32(0, 2, 5), 3)
  np.testing.assert_array_equal(
    within, [[False] * 3, [True, True, False], [True] * 3]
  )
  assert arrays.is_within(_int32(1), 0).shape == (1, 0)


def test_count_leading():
  rows = [[1, 1, 1], [1, 0, 1], [0, 1, 1], [0, 0, 0]]
  counts = arrays.count_leading(jnp.array(rows, bool))
  np.testing.assert_array_equal(counts, [3, 1, 0, 0])
  assert counts.dtype == jnp.int32
  empty = arrays.count_leading(jnp.zeros((2, 0), bool))
  np.testing.assert_array_equal(empty, [0, 0])


def test_pick():
  values = jnp.arange(24.0).reshape(2, 3, 4)
  picked = arrays.pick(values, jnp.array([[0, 3, 1], [2, 2, 0]], jnp.int32))
  np.testing.assert_array_equal(picked, [[0, 7, 9], [14, 18, 20]])
