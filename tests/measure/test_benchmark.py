"""The margin of a first difference, from the cache that decoding left."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from specdec_jax import logits
from specdec_jax.base import Params
from specdec_jax.measure import sameness, sides
from tests import toy

V, MAX_LEN = 11, 12


def test_logits_after_a_prefix_are_those_of_reading_it_anew():
  target = toy.llama(V, num_layers=1)
  config = toy.llama_config(V, num_layers=1)
  params = Params(toy.llama_params(config, seed=0))
  side = sides.plain_side(
    params,
    jax.random.key(0),
    [toy.prompt([[1, 2, 3], [4]])],
    target=target,
    max_len=MAX_LEN,
    logits_to_probs=logits.standardize(temperature=0.0),
    eos_id=-1,
  )
  (state,) = side.decode()
  position = 6
  found = sameness._logits_after(target, params, state, position)
  for row in range(2):
    prefix = np.asarray(state.context.tokens)[row, :position].tolist()
    cache = target.init(params.target, toy.prompt([prefix]), MAX_LEN)
    last = jnp.asarray([[prefix[-1]]], jnp.int32)
    expected, _ = target.extend(params.target, last, cache)
    np.testing.assert_allclose(found[row], expected[0, 0], atol=1e-4)
  # A text that is the beginning of the other is not the same text.
  lengths = state.context.lengths.at[1].add(-1)
  shorter = dataclasses.replace(
    state, context=dataclasses.replace(state.context, lengths=lengths)
  )
  for other, is_same in ((state, True), (shorter, False)):
    figures = sameness.sameness(target, params, [state], [other])
    assert figures['identical'] is is_same
    assert figures['num_divergent_rows'] == (not is_same)
    assert figures['first_divergence_margin'] is None
