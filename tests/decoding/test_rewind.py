"""How far back the loop rewinds a target: within its last call, and no further,
so that a recurrent network, which keeps the states of one call, could be one.
"""

import functools

import jax
import jax.numpy as jnp
import pytest

from specdec_jax import base, drafters
from specdec_jax.base import Array, LanguageModel, Params
from specdec_jax.decoding import speculative
from specdec_jax.decoding.method import Method
from tests import toy, toy_tree
from tests.decoders import SAMPLED

V, MAX_LEN = 5, 24
TARGET = toy.toy(V)
PARAMS = Params(toy.toy_params(V, seed=1), toy.toy_params(V, seed=2))
DRAFTERS = {
  'chain': drafters.autoregressive(TARGET, gamma=3, logits_to_probs=SAMPLED),
  'abstains': drafters.prompt_lookup(gamma=3, min_ngram=1),
  'tree': toy_tree.drafter(
    toy_tree.BENT, is_sampled=True, logits_to_probs=SAMPLED
  ),
}


@base.value
class Watched:
  """A cache, its lengths before the last call, and whether it was only ever
  rewound within that call."""

  cache: toy.ToyCache
  before: Array
  is_within: Array

  @property
  def capacity(self) -> int:
    return self.cache.capacity


def watched(model: LanguageModel) -> LanguageModel:
  def init(params, prompt, max_len):
    cache = model.init(params, prompt, max_len)
    return Watched(
      cache=cache,
      before=cache.lengths,
      is_within=jnp.ones_like(cache.lengths, jnp.bool_),
    )

  def extend(params, tokens, seen, at=None, placement=None):
    before = seen.cache.lengths
    logits, cache = model.extend(params, tokens, seen.cache, at, placement)
    return logits, seen.replace(cache=cache, before=before)

  def rewind(seen, lengths):
    is_within = (lengths >= seen.before) & (lengths <= seen.cache.lengths)
    return seen.replace(
      cache=model.rewind(seen.cache, lengths),
      is_within=seen.is_within & is_within,
    )

  def gather(seen, *args):
    return seen.replace(cache=model.gather(seen.cache, *args))

  return LanguageModel(init, extend, rewind, model.vocab_size, gather)


@pytest.mark.parametrize('name', DRAFTERS)
def test_a_target_is_rewound_within_its_last_call(name):
  rule = {}
  if DRAFTERS[name].tree is not None:
    rule['verify_fn'] = toy_tree.rule('traversal', toy_tree.BENT)
  method = Method(
    target=watched(TARGET),
    drafter=DRAFTERS[name],
    logits_to_probs=SAMPLED,
    eos_id=3,
    **rule,
  )

  @functools.partial(jax.jit, static_argnames='method')
  def decode(params, prompt, method):
    key = jax.random.key(0)
    state = speculative.init(
      params, key, prompt, method=method, max_len=MAX_LEN
    )
    return speculative.run(params, state, method=method)

  prompt = toy.prompt([[1, 2, 3, 1, 2], [2], [4, 4]] * 4)
  state = decode(PARAMS, prompt, method)
  assert state.target_cache.is_within.all()
  assert state.statistics.num_accepted.sum() > 0
