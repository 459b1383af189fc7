"""Block drafters in miniature, for tiny targets with and without an encoder."""

import jax
import jax.numpy as jnp
import numpy as np

from specdec_jax.models import families
from specdec_jax.models.drafting.block_layers import BlockDrafterConfig
from tests import toy, toy_t5


def config(target, **sizes) -> BlockDrafterConfig:
  """Sizes for a target: all of its streams, and all but one of its tokens."""
  num_layers = families.num_layers(target)[-1]
  has_encoder = families.has_encoder(target)
  defaults = {
    'vocab_size': target.vocab_size,
    'draft_vocab_size': target.vocab_size - 1,
    'embed_dim': target.embed_dim,
    'num_layers': 2,
    'num_heads': 4,
    'num_kv_heads': 2,
    'head_dim': 4,
    'mlp_dim': 16,
    'block_size': 3,
    'feature_layers': tuple(range(1, num_layers + 1)),
    'feature_norms': True,
    'markov_rank': 3,
    'has_confidence': True,
    'dtype': target.dtype,
  }
  if has_encoder:
    defaults |= {
      'cross_layers': (0, num_layers - 1),
      'cross_num_heads': target.num_heads,
      'cross_head_dim': target.head_dim,
    }
  return BlockDrafterConfig(**(defaults | sizes))


def params(sizes: BlockDrafterConfig, *, seed: int, left_out: int = 1):
  """Random weights, as `toy.llama_params` has them; the token `left_out` cannot
  be drafted."""
  own = toy.llama_params(sizes, seed=seed)
  if sizes.markov_rank:
    # So that the token before decides much.
    kernel = own['markov_dense']['kernel']
    own['markov_dense'] = {'kernel': 3 * kernel}
  ids = np.delete(np.arange(sizes.vocab_size), left_out)
  if sizes.draft_vocab_size == sizes.vocab_size:
    ids = np.arange(sizes.vocab_size)
  return own | {'target_ids': jnp.asarray(ids, jnp.int32)}


def joined(target, sizes: BlockDrafterConfig, target_params, own):
  """The drafter's params in the loop."""
  bound = families.bind(target, sizes, width=sizes.block_size + 1)
  return jax.jit(bound.join)(target_params, own)


T5 = toy_t5.config(12, num_layers=2)
LLAMA = toy.llama_config(12, num_layers=3)
TARGETS = {
  'T5': (T5, toy_t5.params(T5, seed=1)),
  'Llama': (LLAMA, toy.llama_params(LLAMA, seed=1, scale=2.5)),
}
SOURCES = [[3, 1, 4], [1], [5, 9, 2, 6, 5], [3, 5]]


def case(name: str):
  """A target, its params, the drafter's sizes, and prompts."""
  target, target_params = TARGETS[name]
  sizes = config(target, block_size=4)
  prompt = toy.prompt(SOURCES)
  if families.has_encoder(target):
    prompt = toy.prompt([[0]] * 4, encoder_rows=SOURCES)
  return target, target_params, sizes, prompt
