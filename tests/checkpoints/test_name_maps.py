"""The parameters by name are those of the network."""

import jax
import jax.numpy as jnp
import pytest
from tiny_models import make_config

from specdec_jax.checkpoints import name_maps, stored_arrays
from specdec_jax.models import kv_cache
from specdec_jax.models.llama import Llama


@pytest.mark.parametrize('is_tied', [True, False])
@pytest.mark.parametrize('has_attention_bias', [True, False])
def test_the_tree_is_that_of_the_network(is_tied, has_attention_bias):
  config = make_config(
    vocab_size=11, is_tied=is_tied, has_attention_bias=has_attention_bias
  )
  cache = kv_cache.init(
    batch_size=1,
    num_layers=config.num_layers,
    num_heads=config.num_kv_heads,
    capacity=4,
    head_dim=config.head_dim,
    dtype=jnp.float32,
  )
  expected = jax.eval_shape(
    Llama(config).init,
    jax.random.key(0),
    jnp.zeros((1, 1), jnp.int32),
    cache,
  )['params']
  parameters = name_maps.llama_parameters(config)
  shapes = stored_arrays.nest({p.path: p.shape for p in parameters})
  assert shapes == jax.tree.map(lambda leaf: leaf.shape, expected)


def test_no_name_occurs_twice():
  parameters = name_maps.llama_parameters(
    make_config(is_tied=False, has_attention_bias=True)
  )
  for names in zip(
    *((p.path, p.gguf, p.huggingface) for p in parameters), strict=True
  ):
    assert len(set(names)) == len(parameters)
