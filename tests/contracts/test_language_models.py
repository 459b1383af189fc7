"""What every language model promises."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specdec_jax.base import LanguageModel
from specdec_jax.launch import platforms
from specdec_jax.models import layers, products, quantized
from tests import slow, toy
from tests.contracts.table_of_models import (
  CAPACITY,
  HAS_ENCODER,
  PREFIXES,
  ROWS,
  VOCAB_SIZE,
  close,
  compiled,
  every_model,
  lengths_of,
  prompt_of,
  start,
  tokens_of,
)


@every_model
@pytest.mark.parametrize('batch_size', [1, 5])
def test_extend_is_well_formed(name, batch_size):
  rows = PREFIXES[:batch_size]
  model, params, cache = start(name, rows)
  assert isinstance(model, LanguageModel)
  assert model.vocab_size == VOCAB_SIZE
  logits, after = model.extend(params, tokens_of(3, batch_size), cache)
  assert logits.shape == (batch_size, 3, VOCAB_SIZE)
  assert logits.dtype == jnp.float32
  assert np.isfinite(logits).all()
  shapes = lambda tree: jax.tree.map(lambda a: (a.shape, a.dtype), tree)
  assert shapes(after) == shapes(cache)


@every_model
def test_extend_is_pure_and_compiles(name):
  model, params, cache = start(name)
  first, _ = model.extend(params, tokens_of(3), cache)
  again, _ = model.extend(params, tokens_of(3), cache)
  np.testing.assert_array_equal(first, again)
  eager, _ = ROWS[name][0].extend(params, tokens_of(3), cache)
  close(eager, first)


@pytest.mark.slow
@every_model
def test_extend_by_many_is_extend_by_one_many_times(name):
  model, params, cache = start(name)
  tokens = tokens_of(6)
  together, _ = model.extend(params, tokens, cache)
  for t in range(6):
    logits, cache = model.extend(params, tokens[:, t : t + 1], cache)
    close(logits[:, 0], together[:, t])


@every_model
def test_extend_at_one_token_gives_its_logits_alone(name):
  model, params, cache = start(name)
  tokens, at = tokens_of(3), jnp.array([0, 2, 1, 2, 0], jnp.int32)
  every, expected_cache = model.extend(params, tokens, cache)
  alone, found_cache = model.extend(params, tokens, cache, at)
  assert alone.shape == (len(PREFIXES), 1, VOCAB_SIZE)
  close(alone[:, 0], every[jnp.arange(len(PREFIXES)), at])
  jax.tree.map(close, found_cache, expected_cache)


@every_model
def test_init_is_the_prompt_fed_token_by_token(name):
  model, params, cache = start(name)
  tokens = tokens_of(2)
  together, _ = model.extend(params, tokens, cache)
  for row, prefix in enumerate(PREFIXES):
    _, _, own = start(name, [prefix[:1]], first=row)
    fed = prefix[:-1] + tokens[row].tolist()
    for token in fed:
      logits, own = model.extend(params, jnp.array([[token]], jnp.int32), own)
    close(logits[0, 0], together[row, 1])


@every_model
def test_append_rewind_append_is_append(name):
  model, params, cache = start(name)
  kept, wasted, tokens = (
    tokens_of(5, seed=1),
    tokens_of(4, seed=2),
    tokens_of(3),
  )
  counts = jnp.array([0, 1, 2, 4, 5], jnp.int32)
  lengths = lengths_of(PREFIXES) - 1 + counts

  _, used = model.extend(params, kept, cache)
  _, used = model.extend(params, wasted, used)
  used = model.rewind(used, lengths)
  logits, _ = model.extend(params, tokens, used)

  for row, prefix in enumerate(PREFIXES):
    context = prefix[:-1] + kept[row, : counts[row]].tolist() + [0]
    _, _, own = start(name, [context], first=row)
    expected, _ = model.extend(params, tokens[row : row + 1], own)
    close(logits[row], expected[0])


@every_model
def test_rewind_changes_lengths_and_nothing_else(name):
  model, _, cache = start(name)
  lengths = jnp.array([3, 0, 1, 2, 0], jnp.int32)
  rewound = model.rewind(cache, lengths)
  np.testing.assert_array_equal(rewound.lengths, lengths)
  before = jax.tree.leaves_with_path(cache)
  after = jax.tree.leaves(rewound)
  for (path, old), new in zip(before, after, strict=True):
    if 'lengths' not in jax.tree_util.keystr(path):
      np.testing.assert_array_equal(old, new)


@every_model
def test_row_alone_reads_as_in_a_batch(name):
  model, params, cache = start(name)
  together, _ = model.extend(params, tokens_of(3), cache)
  for row, prefix in enumerate(PREFIXES):
    _, _, own = start(name, [prefix], first=row)
    alone, _ = model.extend(params, tokens_of(3)[row : row + 1], own)
    close(alone[0], together[row])


@pytest.mark.slow
@every_model
def test_padding_and_capacity_do_not_matter(name):
  model, params, cache = start(name)
  logits, _ = model.extend(params, tokens_of(3), cache)
  encoder = {'encoder_width': 11} if name in HAS_ENCODER else {}
  prompt = prompt_of(name, width=15, **encoder)
  wide = model.init(params, prompt, CAPACITY + 9)
  other, _ = model.extend(params, tokens_of(3), wide)
  close(other, logits)


@every_model
def test_logits_do_not_look_ahead(name):
  model, params, cache = start(name)
  tokens = tokens_of(4)
  logits, _ = model.extend(params, tokens, cache)
  changed = tokens.at[:, 2].set((tokens[:, 2] + 1) % VOCAB_SIZE)
  other, _ = model.extend(params, changed, cache)
  np.testing.assert_array_equal(logits[:, :2], other[:, :2])
  assert (np.abs(logits[:, 2:] - other[:, 2:]).max((1, 2)) > 1e-3).all()


def test_a_window_hides_what_is_before_it():
  """Two layers of three positions see five tokens, and not the sixth."""
  model, params = compiled('llama, a window')
  tokens = tokens_of(8, batch_size=1)
  changed = tokens.at[:, 2].set((tokens[:, 2] + 1) % VOCAB_SIZE)
  _, _, cache = start('llama, a window', [[1]])
  logits, _ = model.extend(params, tokens, cache)
  other, _ = model.extend(params, changed, cache)
  differs = np.abs(logits - other).max(axis=-1)[0] > 1e-4
  assert differs.tolist() == [False] * 2 + [True] * 5 + [False]


@pytest.mark.slow
@pytest.mark.parametrize('name', sorted(HAS_ENCODER))
def test_the_encoder_is_read(name):
  model, params, cache = start(name)
  logits, _ = model.extend(params, tokens_of(2), cache)
  _, _, other = start(name, first=1)
  changed, _ = model.extend(params, tokens_of(2), other)
  assert (np.abs(logits - changed).max((1, 2)) > 1e-3).all()


def test_a_prompt_of_the_wrong_kind_is_refused():
  with_encoder, params, _ = start('T5 1.1')
  with pytest.raises(ValueError, match='needs encoder tokens'):
    with_encoder.init(params, toy.prompt(PREFIXES), CAPACITY)
  without, params, _ = start('T5, decoder only')
  with pytest.raises(ValueError, match='no encoder'):
    without.init(params, prompt_of('T5 1.1'), CAPACITY)


@pytest.mark.slow
@pytest.mark.parametrize(
  'name', ['llama, one head, tied, biased', 'T5 1.0', 'Gemma 3']
)
@pytest.mark.parametrize('has_rows', [False, True])
def test_copied_embeddings_give_the_same_logits(name, has_rows, monkeypatch):
  monkeypatch.setattr(products, 'multiplies_rows', lambda _: has_rows)
  model, params, cache = start(name)
  expected, _ = model.extend(params, tokens_of(3), cache)
  copied = products.with_cpu_copies(params, is_tied=True)
  assert layers.num_params(copied) == layers.num_params(params) > 0
  actual, _ = model.extend(copied, tokens_of(3), cache)
  close(actual, expected)
  # It is what is read.
  embedder = copied['token_embedder']
  copy = quantized.ROWS * has_rows + quantized.TRANSPOSED
  embedder[copy] = 2 * embedder[copy]
  doubled, _ = model.extend(copied, tokens_of(3), cache)
  close(doubled, 2 * expected)


@slow.parametrize(
  'name', ['llama, one head, tied, biased', 'T5 1.1', 'T5Gemma'], now=['T5 1.1']
)
@pytest.mark.parametrize('num_rows', [1, 2])
@pytest.mark.parametrize(
  ('has_rows', 'is_intel'), [(False, False), (True, False), (True, True)]
)
def test_joined_kernels_give_the_same_logits(
  name, num_rows, has_rows, is_intel, monkeypatch
):
  monkeypatch.setattr(products, 'multiplies_rows', lambda _: has_rows)
  monkeypatch.setattr(platforms, 'is_intel', lambda: is_intel)
  jax.clear_caches()  # Traces do not know the processor.
  model, params, cache = start(name)
  cache = jax.tree.map(lambda leaf: leaf[:num_rows], cache)
  tokens = tokens_of(1)[:num_rows]
  expected, _ = model.extend(params, tokens, cache)
  joined = products.with_cpu_copies(params, is_tied=False)
  assert layers.num_params(joined) == layers.num_params(params)
  actual, _ = model.extend(joined, tokens, cache)
  close(actual, expected)
  # They are what is read, or their rows; for a single row these are for Intel's
  # processors, and for `wo`, whose transpose is read anyway.
  few = 'rows_of_kernel' if has_rows else 'kernel'
  read = few if num_rows > 1 or is_intel else 'kernel'
  tall = 'float32_kernel' if num_rows == 1 and not has_rows else few
  layer = joined.get('decoder', joined)['layers_0']
  assert 'query' not in layer['self_attention']
  kernels = [
    layer['self_attention']['query_key_value'][read],
    layer['mlp']['wi_0_wi_1'][read],
    layer['mlp']['wo'][tall],
  ]
  for kernel in kernels:
    swap = functools.partial(_zeroed, kernel)
    changed, _ = model.extend(jax.tree.map(swap, joined), tokens, cache)
    assert np.abs(changed - expected).max() > 1e-3


def _zeroed(chosen, leaf):
  return 0 * leaf if leaf is chosen else leaf
