"""Random keys of every kind become threefry's."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specdec_jax.sampling import keys

OTHERS = ['rbg', 'unsafe_rbg']


def key(seed: int, impl: str = 'threefry2x32'):
  return jax.random.key(seed, impl=impl)


def words(random_keys) -> np.ndarray:
  return np.asarray(jax.random.key_data(random_keys))


@pytest.mark.parametrize('impl', ['threefry2x32', *OTHERS])
@pytest.mark.parametrize('is_raw', [False, True])
def test_a_seed_has_the_streams_of_threefry(impl, is_raw):
  given = key(7, impl)
  made = keys.threefry(jax.random.key_data(given) if is_raw else given)
  assert made.dtype == key(0).dtype
  np.testing.assert_array_equal(words(made), words(key(7)))


def test_rbg_that_was_split_and_folded_has_the_streams_of_threefry():
  derive = lambda key: jax.random.split(jax.random.fold_in(key, 3), (4, 2))
  made = keys.threefry(derive(key(7, 'rbg')))
  assert made.shape == (4, 2)
  np.testing.assert_array_equal(words(made), words(derive(key(7))))


def test_all_words_of_a_key_count():
  data = np.array([[1, 2, 3, 4], [1, 2, 3, 5], [1, 2, 4, 4], [0, 2, 3, 4]])
  made = words(keys.threefry(jnp.asarray(data, jnp.uint32)))
  assert len({tuple(row) for row in made}) == 4
  alone = words(keys.threefry(jnp.asarray(data[1], jnp.uint32)))
  np.testing.assert_array_equal(alone, made[1])


@pytest.mark.parametrize('impl', OTHERS)
def test_rows_split_and_draw_by_their_own_keys(impl):
  row_keys = jax.random.split(key(1, impl), 5)
  draw_fn = lambda key: jax.random.uniform(key, (3,))
  for function in (
    lambda row_keys: words(keys.split(row_keys, 2)).swapaxes(0, 1),
    lambda row_keys: np.asarray(keys.draw(draw_fn, row_keys)),
  ):
    together = function(row_keys)
    assert len({row.tobytes() for row in together}) == 5
    np.testing.assert_array_equal(function(row_keys[3:4]), together[3:4])


@pytest.mark.parametrize(
  ('shape', 'dtype', 'message'),
  [
    ((3,), 'uint32', '2 or 4 words'),
    ((2, 1), 'uint32', '2 or 4 words'),
    ((), 'uint32', '2 or 4 words'),
    ((2,), 'int32', 'got int32'),
  ],
)
def test_what_is_no_key_is_refused(shape, dtype, message):
  with pytest.raises(ValueError, match=message):
    keys.threefry(jnp.zeros(shape, dtype))


def test_several_keys_are_refused_where_one_is_due():
  ids = jnp.arange(3, dtype=jnp.int32)
  with pytest.raises(ValueError, match=r'random key or 3, got \[2\]'):
    keys.row_keys(jax.random.split(key(0)), ids)
