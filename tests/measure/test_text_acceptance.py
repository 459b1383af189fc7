"""Alpha on given texts, against laws read from tables."""

import jax
import numpy as np
import pytest

from specdec_jax import logits
from specdec_jax.base import Params
from specdec_jax.decoding import autoregressive
from specdec_jax.measure import text_acceptance
from tests import toy

V, MAX_LEN = 8, 14


@pytest.mark.parametrize('temperature', [0.0, 0.9])
def test_sums_are_those_of_the_laws(temperature):
  to_probs = logits.standardize(temperature=temperature)
  target = toy.toy(V)
  weights = [toy.toy_params(V, seed=seed) for seed in (1, 2)]
  weights.append(toy.perturb(weights[0], seed=3))
  params = Params(weights[0], tuple(weights))
  prompt = toy.prompt([[1, 2, 3], [4, 2]], row_ids=np.arange(2))
  output = jax.jit(
    lambda params: autoregressive.generate(
      params,
      jax.random.key(0),
      prompt,
      target=target,
      logits_to_probs=to_probs,
      max_len=MAX_LEN,
      eos_id=0,
    )
  )(params)
  sums, counts = jax.jit(
    lambda params: text_acceptance.row_sums(
      params,
      prompt,
      output.tokens,
      output.lengths,
      target=target,
      draft_models=[target] * 3,
      logits_to_probs=to_probs,
    )
  )(params)
  np.testing.assert_array_equal(
    counts, np.asarray(output.lengths) - np.asarray(prompt.decoder_lengths)
  )
  np.testing.assert_allclose(sums[0], counts, rtol=1e-6)  # The target itself.
  for found, tree in zip(sums[1:], weights[1:], strict=True):
    for row, length in enumerate(np.asarray(output.lengths)):
      text = np.asarray(output.tokens[row])
      begin = int(prompt.decoder_lengths[row])
      pairs = np.stack(
        [text[begin - 2 : length - 2], text[begin - 1 : length - 1]]
      )
      p, q = (
        np.asarray(to_probs(np.asarray(each['table'])[pairs[0], pairs[1]]))
        for each in (weights[0], tree)
      )
      expected = np.minimum(p, q).sum()
      assert found[row] == pytest.approx(expected, rel=1e-5)
  assert (np.asarray(sums[1]) < 0.9 * np.asarray(counts)).all()
