"""Attention reads the blocks of a cache that somebody sees, and gives what all
of it gives."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specdec_jax import base, trees
from specdec_jax.models import attention, kv_cache
from tests import slow, toy
from tests.contracts.table_of_models import (
  PREFIXES,
  ROWS,
  compiled,
  prompt_of,
  tokens_of,
)

B, H, GROUP, T, D, S = 3, 2, 3, 4, 8, 700
SIZE = attention.block_size(S, 256)
# In the first block, across two, and in the last, which begins where it fits.
LENGTHS = (3, 254, 690)
TREE = base.Tree((0, 0, 1))


def drawn(batch_size: int = B, seed: int = 0, **options):
  """Arguments of `attend`, random."""
  draw = np.random.default_rng(seed).normal
  array = lambda *shape: draw(size=shape).astype(np.float32)
  queries = 2 * array(batch_size, H * GROUP, T, D)
  keys, values = array(2, batch_size, H, S, D)
  return queries, keys, values, array(batch_size, H * GROUP, T, S)


def placement(kind: str, lengths=LENGTHS) -> base.Placement:
  lengths = jnp.asarray(lengths, jnp.int32)
  if kind == 'tree':
    return trees.placement(TREE, range(T), lengths, S)
  made = attention.placed(lengths, T, S)
  return attention.within(made, 7 if kind == 'window' else 0)


@functools.partial(jax.jit, static_argnames=('softcap', 'used_only'))
def attend(queries, keys, values, mask, bias=None, **options):
  options = {'scale': D**-0.5, 'bias': bias} | options
  return attention.attend(queries, keys, values, mask, **options)


used = functools.partial(attend, used_only=True)


def assert_close(actual, expected):
  np.testing.assert_allclose(actual, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize('softcap', [0.0, 2.0])
@pytest.mark.parametrize('has_bias', [False, True])
@pytest.mark.parametrize('kind', ['text', 'window', 'tree'])
def test_blocks_give_what_the_whole_cache_gives(kind, has_bias, softcap):
  *args, bias = drawn()
  args = *args, placement(kind).mask, bias if has_bias else None
  assert_close(used(*args, softcap=softcap), attend(*args, softcap=softcap))


def test_a_mask_for_all_queries_is_that_of_an_encoder():
  queries, keys, values, _ = drawn()
  mask = (np.arange(S) < np.array(LENGTHS)[:, None])[:, None]
  args = queries, keys, values, mask
  assert_close(used(*args), attend(*args))


@pytest.mark.parametrize(
  ('kind', 'lengths', 'first', 'end'),
  [
    ('text', (3, 254, 255), 0, 2 * SIZE),
    ('text', (3, 30, 252), 0, SIZE),
    ('window', (300, 310, 320), SIZE, 2 * SIZE),
    ('tree', (30, 2, 250), 0, SIZE),
  ],
)
def test_other_blocks_are_not_read(kind, lengths, first, end):
  """NaN times a weight of zero would be NaN."""
  queries, keys, values, _ = drawn()
  mask = placement(kind, lengths).mask
  expected = attend(queries, keys, values, mask)
  is_read = (np.arange(S) >= first) & (np.arange(S) < end)
  only = lambda x: np.where(is_read[:, None], x, np.nan)
  assert_close(used(queries, only(keys), only(values), mask), expected)
  assert np.isnan(attend(queries, only(keys), only(values), mask)).any()
  # And those are: what lies in one of them is seen.
  at = min(lengths) + T - 1
  values[0, :, at] = np.nan
  assert np.isnan(used(queries, keys, values, mask)).any()


@pytest.mark.parametrize('kind', ['text', 'window', 'tree'])
def test_the_bits_of_a_row_do_not_depend_on_the_others(kind):
  *args, bias = drawn()
  args = *args, placement(kind).mask, bias
  together = used(*args)
  for row in range(B):
    # The row in each place, so that shapes and programs are the same.
    alone = used(*(jnp.repeat(x[row : row + 1], B, axis=0) for x in args))
    for each in alone:
      np.testing.assert_array_equal(each, together[row])


def test_who_sees_nothing_gets_numbers_and_nan_stays_nan():
  queries, keys, values, _ = drawn()
  mask = np.array(placement('text').mask)
  mask[0] = False
  assert not used(queries, keys, values, mask)[0].any()
  assert np.isfinite(used(queries, keys, values, np.zeros_like(mask))).all()
  queries[1, :, 2] = np.nan
  found = np.isnan(used(queries, keys, values, mask)).all(axis=2)
  assert np.argwhere(found).tolist() == [[1, 2]]


@pytest.mark.parametrize(
  ('capacity', 'with_loop'),
  [(512, ''), (513, 'cpu'), (1024, 'cpu'), (1025, 'cpu cuda tpu')],
)
def test_a_loop_pays_for_smaller_caches_on_cpus(capacity, with_loop):
  """Programs for other platforms than this one are lowered alike."""
  queries, cache = jnp.ones((1, 2, 1, D)), jnp.ones((1, 2, capacity, D))
  mask = jnp.ones((1, 1, capacity), bool)
  traced = attend.trace(queries, cache, cache, mask, used_only=True)
  texts = {
    name: traced.lower(lowering_platforms=(name,)).as_text()
    for name in ('cpu', 'cuda', 'tpu')
  }
  found = [name for name, text in texts.items() if 'stablehlo.while' in text]
  assert found == with_loop.split()


@pytest.mark.parametrize(('room', 'entries'), [(1, 8), (16, 16), (4099, 4104)])
def test_a_cache_is_as_long_as_tiles(room, entries):
  config = toy.llama_config(12, num_layers=1)
  make = functools.partial(kv_cache.init, config, 2, room, 1)
  assert jax.eval_shape(make).capacity == entries


def logits_of(name: str, *, row: int | None = None):
  """Logits of a text and of a tree behind prompts, or behind one alone."""
  model, params = compiled(name)
  chosen = slice(None) if row is None else slice(row, row + 1)
  prompt = prompt_of(name, PREFIXES[chosen], first=row or 0)
  cache = model.init(params, prompt, 16)
  tokens = tokens_of(T)[chosen]
  of_text, _ = model.extend(params, tokens, cache)
  placed = trees.placement(TREE, range(T), cache.lengths, cache.capacity)
  of_tree, _ = model.extend(params, tokens, cache, placement=placed)
  return np.stack([of_text, of_tree])


@slow.parametrize('name', ROWS, now=['Gemma 3'])
def test_every_model_reads_blocks(name, monkeypatch):
  jax.clear_caches()
  expected = logits_of(name)
  found = {}
  # Blocks of three entries, the last of which overlap: 16 is no multiple.
  for size in (3, 5):
    monkeypatch.setattr(
      attention, 'block_size', lambda capacity, least, size=size: size
    )
    jax.clear_caches()
    compiled.cache_clear()
    found[size] = logits_of(name)
    assert_close(found[size], expected)
  # They were other programs, unless the model has no attention.
  is_same = np.array_equal(found[3], expected)
  compiled.cache_clear()
  jax.clear_caches()
  assert is_same == (name == 'toy')
