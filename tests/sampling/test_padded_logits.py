"""Models of one vocabulary whose logits are padded to different sizes."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specdec_jax import drafters, verification
from specdec_jax.base import Params
from specdec_jax.decoding import autoregressive, speculative
from specdec_jax.decoding.method import Method
from specdec_jax.models import families
from specdec_jax.sampling import logits
from tests import slow, toy

# Ids with a token; the target pads them to 16, the drafter to fewer or more.
V, TARGET_V, GAMMA, MAX_LEN, EOS = 11, 16, 3, 24, 1
DRAFTER_VS = [V, 13, 24]


@functools.cache
def target_params():
  return pad(toy.llama_params(toy.llama_config(V), seed=1), TARGET_V)


@functools.cache
def drafter_params(vocab_size: int):
  """A worse model than the target, the same whatever its padding."""
  params = toy.llama_params(toy.llama_config(V), seed=1)
  return pad(toy.perturb(params, seed=2, scale=0.2), vocab_size)


def pad(params, vocab_size: int):
  """More rows of embeddings and logits, which are larger than all others."""
  more = vocab_size - V
  embedding = params['token_embedder']['embedding']
  kernel = params['logits_dense']['kernel']
  return params | {
    'token_embedder': {
      'embedding': jnp.pad(embedding, ((0, more), (0, 0)), constant_values=9.0)
    },
    'logits_dense': {
      'kernel': jnp.pad(kernel, ((0, 0), (0, more)), constant_values=9.0)
    },
  }


def decode(drafter_v: int, *, temperature: float, rule):
  to_probs = logits.standardize(temperature=temperature, vocab_size=V)
  small = families.with_logits_of(toy.llama(drafter_v), TARGET_V)
  generate = functools.partial(
    speculative.generate,
    method=Method(
      target=toy.llama(TARGET_V),
      drafter=drafters.autoregressive(
        small, gamma=GAMMA, logits_to_probs=to_probs
      ),
      verify_fn=rule,
      logits_to_probs=to_probs,
      eos_id=EOS,
    ),
    max_len=MAX_LEN,
  )
  params = Params(target_params(), drafter_params(drafter_v))
  return jax.jit(generate)(params, jax.random.key(0), prompt())


def prompt():
  return toy.prompt([[3, 4, 5], [2], [7, 9], [10, 4, 4]], width=3)


@slow.parametrize('vocab_size', DRAFTER_VS, now=[13])
def test_logits_are_cut_or_filled_beyond_the_vocabulary(vocab_size):
  def extend(vocab_size):
    model = families.with_logits_of(toy.llama(vocab_size), TARGET_V)
    model = toy.compiled(model)
    assert model.vocab_size == TARGET_V
    params = drafter_params(vocab_size)
    cache = model.init(params, prompt(), MAX_LEN)
    return model.extend(params, prompt().decoder_tokens, cache)[0]

  found, expected = extend(vocab_size), extend(TARGET_V)
  assert found.shape == expected.shape
  to_probs = logits.standardize(vocab_size=V)
  probs, expected = to_probs(found), to_probs(expected)
  np.testing.assert_allclose(probs, expected, rtol=1e-5, atol=1e-7)
  assert np.all(probs[..., V:] == 0)


@functools.cache
def plain_tokens():
  """The target's own, once for all drafters."""
  generate = functools.partial(
    autoregressive.generate,
    method=Method(
      target=toy.llama(TARGET_V),
      logits_to_probs=logits.standardize(temperature=0.0, vocab_size=V),
      eos_id=EOS,
    ),
    max_len=MAX_LEN,
  )
  params = Params(target_params())
  output = jax.jit(generate)(params, jax.random.key(0), prompt())
  return np.asarray(output.tokens)


@slow.parametrize('vocab_size', DRAFTER_VS, now=[13])
def test_greedy_decoding_is_the_targets_own(vocab_size):
  found = decode(vocab_size, temperature=0.0, rule=verification.greedy)
  np.testing.assert_array_equal(found.tokens, plain_tokens())
  accepted = np.sum(found.statistics.num_accepted)
  assert 0 < accepted < np.sum(found.statistics.num_drafted)
  assert np.max(found.tokens) < V


@pytest.mark.slow
@pytest.mark.parametrize('vocab_size', DRAFTER_VS)
def test_samples_are_those_of_a_drafter_with_the_targets_padding(vocab_size):
  """Whose exactness other tests show: drafts and their probs are the same."""
  rule = verification.block_verification
  found = decode(vocab_size, temperature=0.9, rule=rule)
  expected = decode(TARGET_V, temperature=0.9, rule=rule)
  np.testing.assert_array_equal(found.tokens, expected.tokens)
  for name in ('num_target_runs', 'num_tested', 'num_accepted'):
    np.testing.assert_array_equal(
      getattr(found.statistics, name), getattr(expected.statistics, name)
    )
  assert np.max(found.tokens) < V
