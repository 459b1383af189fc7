"""What every network that keeps its residual streams promises, and that EAGLE
heads and blockwise heads decode with each of them."""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specdec_jax import drafters, lazy
from specdec_jax.base import Params
from specdec_jax.models import families, taps
from tests import decoders, slow, toy, toy_eagle
from tests.contracts.table_of_models import (
  CAPACITY,
  NETWORKS,
  PREFIXES,
  VOCAB_SIZE,
  close,
  prompt_of,
  start,
  tokens_of,
)

GAMMA = 3
# One of each family, with what later models of it add.
FAMILIES = (
  *('llama', 'llama, later', 'llama, experts', 'Gemma 2', 'Gemma 3'),
  *('Gemma 4', 'Gemma 4, E2B'),
  *('T5 1.1', 'T5, decoder only', 'T5Gemma'),
)


def network_of(name: str):
  return families.network(NETWORKS[name][0])


def extended(name: str, model, *, width: int):
  """The logits and the cache of a call of some tokens after the prefixes."""
  _, params, _ = start(name)
  model = toy.compiled(model)
  cache = model.init(params, prompt_of(name), CAPACITY)
  return model.extend(params, tokens_of(width), cache)


def first_layers_output(name: str, tokens) -> np.ndarray:
  """As the first layer of the decoder itself gives it."""
  network, (_, params, cache) = network_of(name), start(name)
  _, seen = network.module.apply(
    {'params': params},
    tokens,
    cache,
    method='extend',
    capture_intermediates=lambda module, method: 'layers_0' in module.path,
    mutable=['intermediates'],
  )
  outputs = {
    jax.tree_util.keystr(path): leaf
    for path, leaf in jax.tree.leaves_with_path(seen)
  }
  [found] = [
    leaf
    for path, leaf in outputs.items()
    if path.endswith("['layers_0']['__call__'][0][0]")
  ]
  return found


@slow.parametrize('name', FAMILIES, now=['llama, later', 'T5 1.1', 'Gemma 3'])
def test_features_are_those_of_a_plain_call(name):
  network, tokens = network_of(name), tokens_of(4)
  streams = (1, network.num_layers, taps.LAST)
  model = taps.last_call(network, streams, width=4)
  logits, cache = extended(name, model, width=4)
  plain, params, plain_cache = start(name)
  expected, _ = plain.extend(params, tokens, plain_cache)
  np.testing.assert_array_equal(logits, expected)
  first, _, last = np.split(np.asarray(cache.features), 3, axis=-1)
  close(first, first_layers_output(name, tokens))
  # And what the logits are made of makes them.
  close(network.project(params, jnp.asarray(last)), expected)
  np.testing.assert_array_equal(cache.starts, plain_cache.lengths)


@slow.parametrize('name', FAMILIES, now=['llama, later', 'T5 1.1', 'Gemma 3'])
def test_a_text_has_its_features_however_it_is_cut_into_calls(name):
  """Streams of all positions, of the prompt, and of the last call."""
  network = network_of(name)
  whole = taps.all_positions(network, (1,))
  _, cache = extended(name, whole, width=3)
  bits = np.asarray(cache.streams)[:, 0].view(jnp.bfloat16)
  recorded = bits.astype(np.float32)
  _, last = extended(name, taps.last_call(network, (1,), width=2), width=3)
  for row, prefix in enumerate(PREFIXES):
    first = len(prefix) - 1
    near = functools.partial(np.testing.assert_allclose, rtol=2**-7, atol=1e-6)
    near(recorded[row, first : first + 2], last.features[row])
    near(recorded[row, :first], last.prompt[row, :first])


@pytest.mark.slow
def test_streams_cost_nothing_when_nobody_asks(monkeypatch):
  def programs() -> list[str]:
    found = []
    for name in FAMILIES:
      _, params, cache = start(name)
      extend = jax.make_jaxpr(families.language_model(NETWORKS[name][0]).extend)
      found.append(str(extend(params, tokens_of(2), cache)))
    return found

  found = programs()
  monkeypatch.setattr(nn.Module, 'sow', lambda *args, **options: None)
  assert programs() == found


def test_a_stream_that_is_not_there_is_refused():
  for layer in (0, 3):
    with pytest.raises(ValueError, match=f'layer {layer} is not one of 1 to 2'):
      taps.last_call(network_of('llama'), (layer,), width=2)


def eagle_pair(name: str, gamma: int) -> tuple:
  """An EAGLE-3 network of the width of a target, and both sides' params."""
  config, params = NETWORKS[name][0], start(name)[1]
  sizes = toy_eagle.config(
    toy.llama_config(VOCAB_SIZE, embed_dim=config.embed_dim),
    feature_layers=tuple(range(1, network_of(name).num_layers + 1)),
  )
  bound = families.bind(config, sizes, width=gamma + 1)
  own = bound.join(params, toy_eagle.params(sizes, seed=2))
  drafter = drafters.autoregressive(
    drafters.eagle(bound.model),
    gamma=gamma,
    logits_to_probs=decoders.GREEDY,
    is_argmax=True,
  )
  return bound.target, drafter, Params(params, own)


PAIRS = (
  eagle_pair,
  *lazy.installed('tests.contrib.block_heads.contract_rows:heads_pair'),
)


@pytest.mark.slow
@pytest.mark.parametrize('pair', PAIRS)
@pytest.mark.parametrize('name', FAMILIES)
def test_speculative_tokens_are_those_of_plain_decoding(name, pair):
  target, drafter, params = pair(name, GAMMA)
  settings = {'to_probs': decoders.GREEDY, 'max_len': CAPACITY - GAMMA - 1}
  prompt = prompt_of(name, width=6)
  output = decoders.speculate(target, params, drafter, prompt, **settings)
  plain = decoders.plain(
    families.language_model(NETWORKS[name][0]), params, prompt, **settings
  )
  assert decoders.rows(output) == decoders.rows(plain)
  assert output.statistics.num_accepted.sum() > 0
