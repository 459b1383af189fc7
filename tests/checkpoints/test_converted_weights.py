"""bfloat16 on CPUs: no weight is converted in a decoding loop, nor a cache.

XLA multiplies a single row in float32, after it has converted the weights:
before a plain loop, but not before a loop in it that may not run, such as
iterations without a draft. With `products.with_cpu_copies` it does not.
"""

import functools
import itertools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specdec_jax import drafters
from specdec_jax.base import Params
from specdec_jax.decoding import speculative
from specdec_jax.decoding.method import Method
from specdec_jax.launch import platforms
from specdec_jax.models import families, layers, products, quantized
from specdec_jax.models.drafting import draft_vocabulary
from specdec_jax.sampling import logits
from tests import slow, toy, toy_eagle, toy_families, toy_t5
from tests.decoding.test_compilation import in_loops, optimized_hlo

pytestmark = pytest.mark.optimized

V, MAX_LEN, GAMMA = 40, 32, 4
SIZES = {'dtype': jnp.bfloat16, 'embed_dim': 48, 'mlp_dim': 96}
LLAMA = toy.llama_config(V, num_layers=1, is_tied=True, **SIZES)
EAGLE = toy_eagle.config(LLAMA)
T5 = toy_t5.config(V, num_layers=1, num_heads=4, **SIZES)
MODELS = {
  'llama': (LLAMA, functools.partial(toy.llama_params, LLAMA)),
  'encoder-decoder': (T5, functools.partial(toy_t5.params, T5)),
}
GREEDY = logits.standardize(temperature=0)


def autoregressive(model):
  return drafters.autoregressive(
    model, gamma=GAMMA, logits_to_probs=GREEDY, is_argmax=True
  )


DRAFTERS = {
  'prompt_lookup': lambda model: drafters.prompt_lookup(gamma=GAMMA),
  'autoregressive': autoregressive,
  'adaptive': lambda model: drafters.adaptive(
    model, gamma=GAMMA, logits_to_probs=GREEDY, min_prob=0.1
  ),
}
CASES = [*itertools.product(MODELS, DRAFTERS), ('llama', 'eagle')]


def in_bfloat16(params):
  """A tree of weights, and the integers that are among them."""
  return jax.tree.map(
    lambda a: (
      a.astype(jnp.bfloat16) if jnp.issubdtype(a.dtype, jnp.floating) else a
    ),
    params,
  )


def bfloat16_params(name: str):
  return in_bfloat16(MODELS[name][1](seed=0))


def prompt_of(name: str):
  is_llama = name == 'llama'
  return toy.prompt(
    [[1, 2, 3] if is_llama else [0]],
    encoder_rows=None if is_llama else [[5, 6, 7]],
  )


def loop_of(name: str, drafter: str, params):
  """The method of a loop, and the params of both."""
  model = families.language_model(MODELS[name][0])
  if drafter == 'eagle':
    model, network = toy_families.networks(LLAMA, EAGLE, gamma=GAMMA)
    made = autoregressive(drafters.eagle(network))
    own = in_bfloat16(toy_eagle.params(EAGLE, seed=1))
    own = products.with_cpu_copies(own, is_tied=False)
    both = Params(params, toy_eagle.joined(params, own))
  else:
    made = DRAFTERS[drafter](model)
    both = Params(params, () if drafter == 'prompt_lookup' else params)
  method = Method(target=model, drafter=made, logits_to_probs=GREEDY, eos_id=1)
  return method, both


def converted_weights(name: str, drafter: str, params) -> list[str]:
  """Conversions to float32 in the compiled loop, of a weight's or a cache's
  shape."""
  method, both = loop_of(name, drafter, params)
  state = jax.eval_shape(
    lambda params, prompt: speculative.init(
      params, jax.random.key(0), prompt, method=method, max_len=MAX_LEN
    ),
    both,
    prompt_of(name),
  )
  run = functools.partial(speculative.run, method=method)
  hlo = optimized_hlo(jax.jit(run), both, state)
  shapes = lambda *names: {
    leaf.shape
    for path, leaf in jax.tree.leaves_with_path(both)
    if path[-1].key in names
  }
  kernels = shapes('kernel', quantized.TRANSPOSED)
  # A lookup converts the rows that it takes, in the fusion that takes them.
  kernels -= shapes('embedding')
  # Where a head has one query, as in a T5, it is multiplied in float32.
  caches = jax.tree.leaves((state.target_cache, state.drafter_state))
  if name == 'llama':
    kernels |= {leaf.shape for leaf in caches if leaf.ndim == 4}
  found = []
  for line in in_loops(hlo):
    match = re.search(r'= f32\[([\d,]+)\]\S* convert\(', line)
    if match and tuple(map(int, match[1].split(','))) in kernels:
      found.append(line.strip())
  return found


@slow.parametrize(
  ('name', 'drafter'),
  CASES,
  now=[
    ('llama', 'adaptive'),
    ('llama', 'eagle'),
    ('encoder-decoder', 'autoregressive'),
  ],
)
def test_no_weight_is_converted_in_the_loop(name, drafter):
  is_tied = MODELS[name][0].is_tied
  params = products.with_cpu_copies(bfloat16_params(name), is_tied=is_tied)
  assert converted_weights(name, drafter, params) == []


@pytest.mark.slow
@pytest.mark.parametrize('name', MODELS)
def test_converted_weights_are_seen(name):
  assert converted_weights(name, 'prompt_lookup', bfloat16_params(name))


@pytest.mark.slow
@pytest.mark.parametrize('prefix', ['rows_of_', 'float32_'])
@pytest.mark.parametrize('name', MODELS)
def test_a_single_row_reads_the_copies(name, prefix, monkeypatch):
  has_rows = prefix == quantized.ROWS
  monkeypatch.setattr(products, 'multiplies_rows', lambda _: has_rows)
  config, _ = MODELS[name]
  model, params = families.language_model(config), bfloat16_params(name)
  if has_rows:
    params = jax.tree.map(lambda leaf: leaf.astype(jnp.float32), params)
  copied = products.with_cpu_copies(params, is_tied=config.is_tied)
  assert layers.num_params(copied) == layers.num_params(params)
  cache = toy.compiled(model).init(params, prompt_of(name), MAX_LEN)

  @functools.partial(jax.jit, static_argnums=1)
  def extend(params, width):
    tokens = jnp.full((1, width), 9, jnp.int32)
    return model.extend(params, tokens, cache)[0]

  # The same products: a row that is not rounded differs by 1e-3.
  expected = np.asarray(extend(params, 1))
  np.testing.assert_allclose(
    extend(copied, 1), expected, atol=1e-6 * np.abs(expected).max()
  )
  doubled = jax.tree_util.tree_map_with_path(
    lambda path, leaf: leaf * (1 + path[-1].key.startswith(prefix)), copied
  )
  assert (extend(doubled, 1) != extend(copied, 1)).any()
  # Rows serve several rows of activations, too; the copies in float32 do not.
  is_same = extend(doubled, 2) == extend(copied, 2)
  assert not is_same.all() if has_rows else is_same.all()


@pytest.mark.parametrize('is_tied', [False, True])
def test_few_rows_read_the_tiles(is_tied, monkeypatch):
  monkeypatch.setattr(products, 'multiplies_rows', lambda _: False)
  sizes = {'embed_dim': 64, 'mlp_dim': 128, 'num_heads': 4, 'num_kv_heads': 2}
  config = toy.llama_config(128, num_layers=1, is_tied=is_tied, **sizes)
  model, params = (
    families.language_model(config),
    toy.llama_params(config, seed=0),
  )
  copied = products.with_cpu_copies(params, is_tied=is_tied)
  assert layers.num_params(copied) == layers.num_params(params)
  # Tiles of [1, 2, 3, 4]: [1, 2] and [3, 4], if they had two columns.
  joint = copied['layers_0']['mlp']['wi_0_wi_1']
  assert joint['tiles_of_kernel'].shape == (4, 64, 64)
  np.testing.assert_array_equal(
    joint['tiles_of_kernel'][1], joint['kernel'][:, 64:128]
  )
  prompt = toy.prompt([[1, 2, 3]])
  cache = toy.compiled(model).init(params, prompt, MAX_LEN)
  doubled = jax.tree_util.tree_map_with_path(
    lambda path, leaf: leaf * (1 + path[-1].key.startswith('tiles_of_')), copied
  )
  ids = np.array([0, 5, 77])
  few = draft_vocabulary.with_logits_of(copied, ids, is_tied=is_tied)
  of_few, _ = families.with_draft_vocabulary(model, ids, 128)

  @functools.partial(jax.jit, static_argnums=(0, 2))
  def extend(model, params, width):
    tokens = jnp.full((1, width), 9, jnp.int32)
    return model.extend(params, tokens, cache)[0]

  for width in (1, 2, 5, 6):
    expected = np.asarray(extend(model, params, width))
    close = functools.partial(
      np.testing.assert_allclose, atol=1e-5 * np.abs(expected).max()
    )
    found = extend(model, copied, width)
    close(found, expected)
    is_read = (extend(model, doubled, width) != found).any()
    assert is_read == (1 < width < 6)
    close(extend(of_few, few, width), expected[..., ids])


PROCESSORS = {
  'Zen 3': 'vendor_id\t: AuthenticAMD\nflags\t\t: fpu avx avx2\n',
  'Zen 4': 'vendor_id\t: AuthenticAMD\nflags\t\t: fpu avx2 avx512f\n',
  'Haswell': 'vendor_id\t: GenuineIntel\nflags\t\t: fpu avx avx2\n',
  'Skylake': 'vendor_id\t: GenuineIntel\nflags\t\t: fpu avx2 avx512f\n',
  'ARM': 'Features\t: fp asimd\n',
  'not Linux': '',
}


@pytest.mark.parametrize('processor', PROCESSORS)
def test_rows_are_for_some_processors(processor, monkeypatch):
  monkeypatch.setattr(platforms, '_cpuinfo', lambda: PROCESSORS[processor])
  weights = lambda size: {'kernel': jax.ShapeDtypeStruct((size,), jnp.float32)}
  has_rows = products.multiplies_rows({'decoder': weights(2**25)})
  assert has_rows == (processor in ('Zen 3', 'Haswell', 'Skylake'))
  # Those that a cache holds; an encoder runs once, so that it does not count.
  small = {'encoder': weights(2**25), 'decoder': weights(2**20)}
  assert products.multiplies_rows(small) == (processor in ('Zen 3', 'Haswell'))
