"""Tokens that are no run of text, in every language model: the nodes of a draft
tree have the logits that their paths have as texts, and a path that was kept is
a text."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specdec_jax import base, lazy, trees
from specdec_jax.drafters.features import FeatureCache
from specdec_jax.models import families, kv_cache, taps
from specdec_jax.sharding import mesh as mesh_lib
from tests import broken, slow, toy, toy_eagle, toy_families
from tests.contracts.table_of_models import (
  CAPACITY,
  PREFIXES,
  VOCAB_SIZE,
  every_model,
  start,
  tokens_of,
)

TREE = base.Tree((0, 0, 1, 1, 2, 4))
NUM_NODES = len(TREE.parents) + 1
DEPTH = trees.depth(TREE)
# The leaves, and where the accepted path of each row ends: a window of two or
# three positions is shorter than the longest.
LEAVES = (3, 5, 6)
ENDS = (6, 5, 0)
BATCH_SIZE = len(ENDS)


def path_to(node: int) -> list[int]:
  """The nodes from the root to one, both included."""
  return path_to(TREE.parents[node - 1]) + [node] if node else [0]


def assert_close(actual, expected, name: str = ''):
  """Compares logits or caches of the model of a name."""
  # Sums of another width can differ in the last bit, and at a tie an int8 key
  # then falls to the next of 255 steps: up to 7e-4 in these models' logits.
  limit = 1e-3 if 'int8 cache' in name else 1e-5
  actual, expected = (np.asarray(x, np.float64) for x in (actual, expected))
  np.testing.assert_allclose(actual, expected, rtol=limit, atol=limit)


def assert_caches_close(actual, expected):
  """Compares caches leaf by leaf; at a tie an int8 entry is a step further."""

  def check(a, b):
    if a.dtype == jnp.int8:
      np.testing.assert_allclose(np.int32(a), np.int32(b), rtol=0, atol=1)
    else:
      assert_close(a, b)

  jax.tree.map(check, actual, expected)


def differs(actual, expected) -> np.ndarray:
  """Whether each row does, by more than `assert_close` allows any model."""
  return np.abs(actual - expected).max(axis=(1, 2)) > 1e-3


def nodes_of() -> jnp.ndarray:
  """Tokens of the root and of all drafted nodes, no two of a row the same."""
  rows = jnp.arange(BATCH_SIZE, dtype=jnp.int32)[:, None]
  nodes = jnp.arange(NUM_NODES, dtype=jnp.int32)[None]
  return (3 * nodes + rows + 1) % VOCAB_SIZE


def along(nodes: list[int]) -> list[int]:
  """A path in the width of the longest, padded with other nodes."""
  return (nodes + [2, 1, 2])[: DEPTH + 1]


def started(name: str):
  return start(name, PREFIXES[:BATCH_SIZE])


def as_text(model, params, cache) -> np.ndarray:
  """The logits of each node `[B, N + 1, V]`, its path being fed as a text."""
  found = np.zeros((BATCH_SIZE, NUM_NODES, model.vocab_size), np.float32)
  for leaf in LEAVES:
    path = path_to(leaf)
    tokens = nodes_of()[:, np.array(along(path))]
    logits, _ = model.extend(params, tokens, cache)
    found[:, path] = logits[:, : len(path)]
  return found


def as_tree(model, params, cache, ends=(NUM_NODES,)):
  """The same logits, all nodes before each end being fed in one call, and the
  cache."""
  starts, found = cache.lengths, []
  for begin, end in zip((0, *ends), ends, strict=False):
    nodes = range(begin, end)
    logits, cache = model.extend(
      params,
      nodes_of()[:, begin:end],
      cache,
      placement=trees.placement(TREE, nodes, starts, cache.capacity),
    )
    found.append(logits)
  return np.concatenate(found, axis=1), cache


def kept(model, cache, starts):
  """A cache of all nodes, once the path of each row to its end is a text."""
  ends = jnp.asarray(ENDS, jnp.int32)
  path = trees.path_of(TREE, ends)
  cache = model.gather(cache, starts + 1, path - 1, len(TREE.parents))
  return model.rewind(cache, starts + jnp.take(num_kept(), ends))


def num_kept() -> jnp.ndarray:
  return jnp.asarray(trees.depths(TREE)) + 1


def fed(model, params, cache):
  """A cache to which the same paths were fed as texts."""
  starts = cache.lengths
  tokens = [
    nodes_of()[row, np.array(along(path_to(end)))]
    for row, end in enumerate(ENDS)
  ]
  _, cache = model.extend(params, jnp.stack(tokens), cache)
  return model.rewind(cache, starts + num_kept()[jnp.asarray(ENDS)])


def following(model, params, cache) -> np.ndarray:
  """Logits of a text that goes on from a cache."""
  tokens = tokens_of(DEPTH + 1, BATCH_SIZE, seed=4)
  logits, _ = model.extend(params, tokens, cache)
  return np.asarray(logits)


@every_model
def test_nodes_have_the_logits_of_their_paths(name):
  expected = as_text(*started(name))
  at_once, cache = as_tree(*started(name))
  assert_close(at_once, expected, name)
  by_level, again = as_tree(*started(name), ends=(3, NUM_NODES))
  assert_close(by_level, expected, name)
  assert_caches_close(again, cache)


@every_model
def test_a_path_that_was_kept_is_a_text(name):
  model, params, cache = started(name)
  expected = following(model, params, fed(model, params, cache))
  _, with_nodes = as_tree(model, params, cache)
  path = kept(model, with_nodes, cache.lengths)
  assert_close(following(model, params, path), expected, name)
  # Without it, or with what lies one further, the text is another.
  in_place = model.rewind(with_nodes, path.lengths)
  wrong = kept(broken.gathered_off_by_one(model), with_nodes, cache.lengths)
  for each in (in_place, wrong):
    is_other = differs(following(model, params, each), expected)
    assert is_other.tolist() == [True, True, False]


@every_model
@slow.parametrize(
  'wrong', ['positions by index', 'siblings seen'], now=['siblings seen']
)
def test_a_wrong_placement_is_seen(name, wrong):
  model, params, cache = started(name)
  expected = as_text(model, params, cache)
  found, _ = as_tree(broken.WITH_TREES[wrong](model), params, cache)
  assert differs(found, expected).all()
  # As far as the tree is a chain they are right.
  assert_close(found[:, :2], expected[:, :2], name)


def test_a_placement_of_other_sizes_is_refused():
  model, params, cache = started('llama')
  lengths = cache.lengths
  placed = functools.partial(trees.placement, TREE, range(4), lengths)
  for capacity, num_tokens in ((CAPACITY - 1, 4), (CAPACITY, 5)):
    message = rf'\(4, {capacity}\) .* \({num_tokens}, 16\)'
    with pytest.raises(ValueError, match=message):
      model.extend(
        params,
        nodes_of()[:, :num_tokens],
        cache,
        placement=placed(capacity),
      )


WRAPPERS = {
  'padded': lambda model: families.with_logits_of(model, VOCAB_SIZE + 2),
  'cut': lambda model: families.with_logits_of(model, VOCAB_SIZE - 2),
}
for rows in lazy.installed('tests.integrations.t5x.contract_rows:WRAPPERS'):
  WRAPPERS |= rows


@pytest.mark.parametrize('name', WRAPPERS)
def test_what_wraps_a_model_hands_placements_on(name):
  inner, params, cache = started('toy')
  model = WRAPPERS[name](inner)
  expected = as_text(model, params, cache)
  assert not np.array_equal(expected, as_text(inner, params, cache))
  found, with_nodes = as_tree(model, params, cache)
  assert_close(found, expected)
  path = kept(model, with_nodes, cache.lengths)
  assert_close(
    following(model, params, path),
    following(model, params, fed(model, params, cache)),
  )


LLAMA = toy.llama_config(VOCAB_SIZE, num_layers=3)


def features_of(cache, row: int, begin: int, end: int) -> np.ndarray:
  """What a cache has kept of the entries of a row."""
  if isinstance(cache, FeatureCache):
    first = int(cache.starts[row])
    begin, end = begin - first, end - first
    return cache.features[row, begin:end]
  return cache.streams[row, 0, begin:end]


@pytest.mark.slow
@pytest.mark.parametrize(
  'model',
  [
    taps.last_call(families.network(LLAMA), (1, 3), width=DEPTH + 1),
    taps.all_positions(families.network(LLAMA), (1, 3)),
  ],
  ids=['features', 'streams'],
)
def test_what_was_kept_of_a_path_is_what_is_kept_of_the_text(model):
  params = toy.llama_params(LLAMA, seed=1)
  model = toy.compiled(model)
  prompt = toy.prompt(PREFIXES[:BATCH_SIZE], width=6)
  cache = model.init(params, prompt, CAPACITY)
  _, with_nodes = as_tree(model, params, cache)
  path = kept(model, with_nodes, cache.lengths)
  text = fed(model, params, cache)
  shapes = lambda tree: jax.tree.map(lambda a: (a.shape, a.dtype), tree)
  assert shapes(path) == shapes(cache)
  np.testing.assert_array_equal(path.lengths, text.lengths)
  for row, (begin, end) in enumerate(
    zip(cache.lengths.tolist(), path.lengths.tolist(), strict=True)
  ):
    found = features_of(path, row, begin, end)
    assert found.shape == (len(path_to(ENDS[row])), 2 * LLAMA.embed_dim)
    assert_close(found, features_of(text, row, begin, end))
  assert_close(following(model, params, path), following(model, params, text))


def test_an_eagle_network_reads_a_tree():
  """Each node with features of its own, as drafting gives it its parent's."""
  sizes = toy_eagle.config(LLAMA)
  _, network = toy_families.networks(LLAMA, sizes, gamma=DEPTH)
  params = toy_eagle.joined(
    toy.llama_params(LLAMA, seed=1), toy_eagle.params(sizes, seed=2)
  )
  extend = jax.jit(network.extend)
  rng = np.random.default_rng(0)
  hidden = jnp.asarray(
    rng.normal(size=(BATCH_SIZE, NUM_NODES, sizes.embed_dim)), jnp.float32
  )
  cache = network.init(params, BATCH_SIZE, CAPACITY)
  _, _, cache = extend(params, nodes_of(), hidden, cache)
  cache = network.rewind(cache, jnp.asarray([5, 0, 2]))
  found = extend(
    params,
    nodes_of(),
    hidden,
    cache,
    placement=trees.placement(
      TREE, range(NUM_NODES), cache.lengths, cache.capacity
    ),
  )
  for leaf in LEAVES:
    path = np.array(path_to(leaf))
    chosen = np.array(along(path.tolist()))
    text = extend(params, nodes_of()[:, chosen], hidden[:, chosen], cache)
    for of_tree, of_text in zip(found[:2], text[:2], strict=True):
      assert_close(of_tree[:, path], of_text[:, : len(path)])


@pytest.mark.parametrize('num_partitions', [None, 2])
def test_entries_move_whatever_their_order(num_partitions):
  rng = np.random.default_rng(0)
  buffer = rng.normal(size=(12, 2, 10, 3)).astype(np.float32)
  starts = rng.integers(0, 5, 12).astype(np.int32)
  offsets = rng.integers(0, 5, (12, 4)).astype(np.int32)
  offsets[0] = 3, 2, 1, 0
  starts[0] = 5
  expected = buffer.copy()
  for row, start_of in enumerate(starts):
    for i, offset in enumerate(offsets[row]):
      source = start_of + offset
      expected[row, :, start_of + i] = buffer[row, :, source]
  move = functools.partial(jax.jit(kv_cache.gather, static_argnums=3), span=5)
  if num_partitions is None:
    found = move(buffer, starts, offsets)
  else:
    with jax.set_mesh(mesh_lib.make(num_partitions=num_partitions)):
      found = move(buffer, starts, offsets)
  np.testing.assert_array_equal(found, expected)
