"""EAGLE-3: a drafter that reads the target's features."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specdec_jax import drafters, verification
from specdec_jax.base import Context, Params
from specdec_jax.decoding import speculative
from specdec_jax.decoding.method import Method
from specdec_jax.models import families
from specdec_jax.sampling import logits
from tests import (
  decoders,
  goodness_of_fit,
  slow,
  toy,
  toy_eagle,
  toy_families,
  trial,
)

V, GAMMA = 4, 3
PARAMS = toy.toy_params(V, seed=1)
ROWS = [[1], [0, 2], [2, 1, 0], [3, 3, 1, 2, 0], [2], [1, 1, 1, 3]]


def counting(*, gamma=GAMMA, num_drafted=V, chain=drafters.eagle):
  """A target that counts, and the chain that a drafter is made of."""
  target, network = toy_eagle.counting(V, gamma=gamma, num_drafted=num_drafted)
  return target, chain(network)


def greedy_decode(
  chain=drafters.eagle, make=drafters.autoregressive, **options
):
  """Rows of a greedy decode, and its counters."""
  target, made = counting(chain=chain)
  drafter = make(
    made,
    gamma=GAMMA,
    logits_to_probs=decoders.GREEDY,
    is_argmax=True,
    **options,
  )
  output = decoders.speculate(
    target,
    Params(PARAMS, PARAMS),
    drafter,
    toy.prompt(ROWS),
    to_probs=decoders.GREEDY,
    max_len=32,
  )
  return decoders.rows(output), output.statistics


@functools.cache
def plain_rows():
  target, _ = counting()
  output = decoders.plain(
    target, Params(PARAMS), toy.prompt(ROWS), to_probs=decoders.GREEDY,
    max_len=32,
  )  # fmt: skip
  return decoders.rows(output)


def first_of(statistics) -> tuple[int, int]:
  """How many first tokens of drafts were accepted, and how many tested."""
  return (
    int(statistics.num_accepted[:, 0].sum()),
    int(statistics.num_tested[:, 0].sum()),
  )


@pytest.mark.slow
def test_first_guess_is_that_of_someone_who_knows_all_features():
  """Whatever was accepted before; its own guesses of features are not right."""
  rows, statistics = greedy_decode()
  assert rows == plain_rows()
  accepted, tested = first_of(statistics)
  assert accepted == tested > 2 * len(ROWS)
  assert (
    statistics.num_accepted[:, 1:].sum() < statistics.num_tested[:, 1:].sum()
  )


@pytest.mark.slow
@pytest.mark.parametrize('name', toy_eagle.BROKEN)
def test_wrong_features_lower_alpha_and_change_no_token(name):
  rows, statistics = greedy_decode(toy_eagle.BROKEN[name])
  assert rows == plain_rows()
  accepted, tested = first_of(statistics)
  assert accepted < 0.9 * tested


@pytest.mark.slow
def test_a_row_copies_or_drafts():
  """And nobody drafts for nobody: no step is taken when all rows copy."""
  target, chain = counting()
  calls = []

  def extend(params, tokens, left, state, target_cache):
    jax.debug.callback(lambda: calls.append(tokens.shape))
    return chain.extend(params, tokens, left, state, target_cache)

  def drafts_of(rows, **options):
    drafter = toy_eagle.looped(
      drafters.adaptive(
        chain._replace(extend=extend),
        gamma=GAMMA,
        logits_to_probs=logits.standardize(),
        **options,
      ),
      target,
    )
    prompt, params = toy.prompt(rows, width=8), Params(PARAMS, PARAMS)
    context = Context(
      tokens=prompt.decoder_tokens, lengths=prompt.decoder_lengths
    )
    state = jax.jit(drafter.init, static_argnums=2)(params, prompt, 16)
    calls.clear()
    keys = jax.random.split(jax.random.key(0), len(rows))
    draft, _ = jax.jit(drafter.propose)(params, keys, context, state)
    jax.effects_barrier()
    return draft, len(calls)

  lookup = drafters.prompt_lookup(gamma=GAMMA, min_ngram=2)
  rows = [[1, 2, 3, 1, 2], [1, 0, 2, 3]]
  alone, num_steps = drafts_of(rows)
  assert num_steps == GAMMA - 1
  both, num_steps = drafts_of(rows, first=lookup)
  assert num_steps == GAMMA - 1
  assert both.lengths.tolist() == [3, GAMMA]
  assert both.tokens[0].tolist() == [3, 1, 2]
  np.testing.assert_array_equal(both.probs[0], np.eye(V)[[3, 1, 2]])
  np.testing.assert_array_equal(both.tokens[1], alone.tokens[1])
  np.testing.assert_array_equal(both.probs[1], alone.probs[1])
  _, num_steps = drafts_of(rows[:1] * 2, first=lookup)
  assert num_steps == 0


def check(*, chain=drafters.eagle, renormalised=False, sampling, make=None):
  """A trial of the counting pair, whose drafter lacks the last token."""
  target, made = counting(num_drafted=V - 1, chain=chain)
  make = make or drafters.autoregressive
  drafter = make(
    made,
    gamma=GAMMA,
    logits_to_probs=logits.standardize(**sampling._asdict()),
  )
  rule = verification.speculative_sampling

  def on_draft_vocabulary(row_keys, draft, target_probs):
    kept = jnp.where(jnp.arange(V)[None, None] < V - 1, target_probs, 0.0)
    total = kept.sum(-1, keepdims=True)
    return rule(row_keys, draft, kept / jnp.maximum(total, 1e-9))

  return trial.run(
    trial.Trial(
      target=target,
      params=Params(PARAMS, toy.perturb(PARAMS, seed=2)),
      drafter=drafter,
      verify_fn=on_draft_vocabulary if renormalised else rule,
      sampling=sampling,
    ),
    num_decodes=2**16,
  )


TOP_3 = goodness_of_fit.Sampling(top_k=3)


@slow.parametrize(
  'options',
  [
    {},
    *({'chain': chain} for chain in toy_eagle.BROKEN.values()),
    {'make': functools.partial(drafters.adaptive, min_prob=0.4)},
    {
      'make': functools.partial(
        drafters.adaptive,
        first=drafters.prompt_lookup(gamma=GAMMA, min_ngram=1),
      )
    },
  ],
  ids=['right', *toy_eagle.BROKEN, 'adaptive', 'lookup first'],
  now=[{}],
)
def test_a_reduced_vocabulary_is_lossless(options):
  result = check(sampling=TOP_3, **options)
  assert not result.report.is_rejected
  accepted = result.statistics.num_accepted.sum()
  assert 0 < accepted < result.statistics.num_tested.sum()


@pytest.mark.slow
def test_p_on_the_draft_vocabulary_is_caught():
  """As in the loss of some training code: alpha looks better, p is another."""
  result = check(sampling=TOP_3, renormalised=True)
  assert result.report.is_rejected


LLAMA = toy.llama_config(12, num_layers=3)
EAGLE = toy_eagle.config(LLAMA, feature_layers=(1, 2, 3))


@functools.cache
def weights() -> Params:
  target = toy.llama_params(LLAMA, seed=1, scale=2.5)
  own = toy_eagle.params(EAGLE, seed=2)
  return Params(target, toy_eagle.joined(target, own))


def test_the_loop_carries_no_features_of_the_prompt():
  target, network = toy_families.networks(LLAMA, EAGLE, gamma=GAMMA)
  drafter = drafters.autoregressive(
    drafters.eagle(network), gamma=GAMMA, logits_to_probs=decoders.GREEDY
  )
  method = Method(
    target=target, drafter=drafter, logits_to_probs=decoders.GREEDY, eos_id=-1
  )
  state = jax.eval_shape(
    lambda params, prompt: speculative.init(
      params, jax.random.key(0), prompt, method=method, max_len=40
    ),
    weights(),
    toy.prompt([list(range(12)), [1]]),
  )  # fmt: skip
  cache = state.target_cache
  assert cache.prompt is None
  assert cache.features.shape == (2, GAMMA + 1, 3 * LLAMA.embed_dim)


@pytest.mark.parametrize(
  'options', [{}, {'min_prob': 0.2}], ids=['fixed', 'adaptive']
)
def test_the_real_network_gives_the_greedy_tokens(options):
  target, network = toy_families.networks(LLAMA, EAGLE, gamma=GAMMA)
  make = drafters.adaptive if options else drafters.autoregressive
  drafter = make(
    drafters.eagle(network),
    gamma=GAMMA,
    logits_to_probs=decoders.GREEDY,
    is_argmax=True,
    **options,
  )
  prompt = toy.prompt([[3, 1, 4], [1], [5, 9, 2, 6, 5], [3, 5]])
  settings = {'to_probs': decoders.GREEDY, 'max_len': 40}
  output = decoders.speculate(target, weights(), drafter, prompt, **settings)
  model = families.language_model(LLAMA)
  plain = decoders.plain(model, weights(), prompt, **settings)
  assert decoders.rows(output) == decoders.rows(plain)
  assert output.statistics.num_accepted.sum() > 0


@pytest.mark.parametrize(
  ('target', 'changes', 'message'),
  [
    ({'embed_dim': 16}, {}, 'width of 8, not 16'),
    ({}, {'embed_dim': 4}, 'embed_dim 4'),
    ({'num_layers': 2}, {}, 'layer 3 is not'),
  ],
)
def test_a_target_that_does_not_fit_is_refused(target, changes, message):
  config = toy_eagle.config(LLAMA, feature_layers=(1, 2, 3), **changes)
  sizes = {'num_layers': 3} | target
  with pytest.raises(ValueError, match=message):
    families.bind(toy.llama_config(12, **sizes), config, width=2)


@pytest.mark.slow
def test_drafters_that_take_turns_need_one_gamma():
  _, chain = counting()
  with pytest.raises(ValueError, match='gamma 3'):
    drafters.adaptive(
      chain,
      gamma=3,
      logits_to_probs=decoders.GREEDY,
      first=drafters.prompt_lookup(gamma=2),
    )
