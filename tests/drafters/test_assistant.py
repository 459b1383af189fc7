"""Assistants of Gemma 4: drafters that read the target's own cache."""

import dataclasses
import functools
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specdec_jax import drafters, verification
from specdec_jax.base import Context, Params
from specdec_jax.checkpoints import huggingface
from specdec_jax.decoding import speculative
from specdec_jax.decoding.method import Method
from specdec_jax.models import families
from specdec_jax.models.drafting.draft_vocabulary import NEVER
from specdec_jax.sampling import logits
from specdec_jax.sharding import mesh as mesh_lib
from tests import (
  decoders,
  slow,
  toy,
  toy_assistant,
  toy_families,
  toy_gemma,
  toy_tree,
  trial,
)

GOLDEN = pathlib.Path(__file__).parents[1] / 'golden'
PAIRS = ('tiny_gemma4', 'tiny_gemma4_e2b')
GAMMA = 3


@functools.cache
def pair(name: str):
  """The network bound to its target, the params of both, and what transformers
  computed."""
  pytest.importorskip('safetensors')
  folders = [GOLDEN / name, GOLDEN / f'{name}_assistant']
  configs = [huggingface.read_config(folder) for folder in folders]
  target, own = (
    huggingface.read_params(folder, config)
    for folder, config in zip(folders, configs, strict=True)
  )
  bound = families.bind(*configs, width=GAMMA + 1)
  with np.load(folders[1] / 'golden.npz') as arrays:
    return bound, Params(target, bound.join(target, own)), dict(arrays)


def drafted(name: str, chain_of=drafters.assistant) -> np.ndarray:
  """Logits `[B, G, V]` of what the chain drafts if it is given transformers'
  drafts."""
  bound, params, golden = pair(name)
  chain = chain_of(bound.model)
  rows = [
    ids[:length].tolist()
    for ids, length in zip(golden['ids'], golden['lengths'], strict=True)
  ]

  @jax.jit
  def run(params, prompt):
    cache = bound.target.init(params.target, prompt, 40)
    state, cache = chain.init(params.drafter, prompt, 40, cache)
    context = Context(
      tokens=prompt.decoder_tokens, lengths=prompt.decoder_lengths
    )
    raw, hidden, state = chain.catch_up(params.drafter, context, state, cache)
    every = [raw[:, None]]
    for i in range(GAMMA - 1):
      raw, hidden, state = chain.extend(
        params.drafter, golden['drafts'][:, i : i + 1], hidden, state, cache
      )
      every.append(raw)
    return jnp.concatenate(every, axis=1)

  return np.asarray(run(params, toy.prompt(rows, width=24)))


@pytest.mark.parametrize('name', PAIRS)
def test_logits_are_those_of_transformers(name):
  """First and later drafts after texts of three lengths, of all tokens and of
  clusters; transformers gives the other clusters the least logit less 1."""
  _, _, golden = pair(name)
  raw, expected = drafted(name), golden['logits']
  is_drafted = raw != NEVER
  has_logits = np.full_like(is_drafted, True)
  if name == 'tiny_gemma4_e2b':
    has_logits = expected > expected.min(axis=-1, keepdims=True)
  np.testing.assert_array_equal(is_drafted, has_logits)
  np.testing.assert_allclose(
    raw[is_drafted], expected[is_drafted], rtol=0, atol=1e-4
  )
  np.testing.assert_array_equal(raw.argmax(-1), golden['drafts'])


@pytest.mark.parametrize('broken', toy_assistant.BROKEN)
def test_what_is_wrong_has_other_logits(broken):
  _, _, golden = pair('tiny_gemma4')
  raw = drafted('tiny_gemma4', toy_assistant.BROKEN[broken])
  assert np.abs(raw - golden['logits']).max() > 0.05


@slow.parametrize(
  ('name', 'make'),
  [
    (name, make)
    for name in PAIRS
    for make in ('fixed', 'adaptive', 'lookup first', 'tree')
  ],
  now=[('tiny_gemma4_e2b', 'fixed')],
)
def test_greedy_tokens_are_those_of_the_target(name, make):
  """Fifty prompts of other lengths and contents, in ragged batches; and those
  of transformers with this assistant."""
  bound, params, _ = pair(name)
  chain = drafters.assistant(bound.model)
  options = {'gamma': GAMMA, 'logits_to_probs': decoders.GREEDY}
  rule = 'speculative_sampling'
  if make == 'fixed':
    drafter = drafters.autoregressive(chain, is_argmax=True, **options)
  elif make == 'tree':
    drafter = drafters.branching(
      chain,
      tree=toy_tree.BENT,
      logits_to_probs=logits.standardize(),
      is_ranked=True,
    )
    rule = toy_tree.rule('target_sample_walk', toy_tree.BENT)
  else:
    first = drafters.prompt_lookup(gamma=GAMMA, min_ngram=1)
    drafter = drafters.adaptive(
      chain,
      is_argmax=True,
      min_prob=0.2,
      first=first if make == 'lookup first' else None,
      **options,
    )
  with np.load(GOLDEN / f'{name}_assistant/texts.npz') as texts:
    expected, lengths = texts['tokens'], texts['lengths']
  rows = [
    row[:length].tolist() for row, length in zip(expected, lengths, strict=True)
  ]
  prompt = toy.prompt(rows, width=12)
  settings = {'to_probs': decoders.GREEDY, 'max_len': expected.shape[1]}
  output = decoders.speculate(
    bound.target, params, drafter, prompt, rule=rule, **settings
  )
  config = huggingface.read_config(GOLDEN / name)
  plain = decoders.plain(
    families.language_model(config), params, prompt, **settings
  )
  assert decoders.rows(output) == decoders.rows(plain) == expected.tolist()
  assert output.statistics.num_accepted.sum() > 0


V = 4
TARGET = toy_gemma.gemma_4(V)


def check(rule, *, is_clustered: bool, chain_of=drafters.assistant):
  """A trial of a toy target and its assistant at temperature 1."""
  sizes = (toy_assistant.clustered if is_clustered else toy_assistant.config)(
    TARGET
  )
  target, model = toy_families.networks(TARGET, sizes, gamma=2)
  target_params = toy_gemma.params(TARGET, seed=1)
  own = toy_assistant.params(sizes, seed=2)
  return trial.run(
    trial.Trial(
      target=target,
      params=Params(target_params, toy_assistant.joined(target_params, own)),
      drafter=drafters.autoregressive(
        chain_of(model), gamma=2, logits_to_probs=logits.standardize()
      ),
      verify_fn=rule,
      num_new=(4, 4, 3),
    ),
    num_decodes=2**16,
  )


@pytest.mark.proof
@pytest.mark.slow
@pytest.mark.parametrize(
  ('rule', 'is_clustered'),
  [
    (rule, is_clustered)
    for rule in (
      verification.speculative_sampling,
      verification.block_verification,
    )
    for is_clustered in (False, True)
  ],
)
def test_sampling_is_lossless(rule, is_clustered):
  result = check(rule, is_clustered=is_clustered)
  assert not result.report.is_rejected
  accepted = result.statistics.num_accepted.sum()
  assert 0 < accepted < result.statistics.num_tested.sum()


@pytest.mark.slow
def test_another_q_than_what_was_drawn_from_is_caught():
  """As an engine that draws from the clusters, and hands over logits that also
  have other tokens."""

  def rule(row_keys, draft, target_probs):
    probs = 0.7 * draft.probs + 0.3 / V
    shown = draft.__class__(
      tokens=draft.tokens, probs=probs, lengths=draft.lengths
    )
    return verification.speculative_sampling(row_keys, shown, target_probs)

  assert check(rule, is_clustered=True).report.is_rejected


@pytest.mark.parametrize(
  ('target', 'changes', 'message'),
  [
    ({}, {'target_embed_dim': 16}, 'width of 16, not 8'),
    ({}, {'num_kv_heads': 1}, 'have 2 key-value heads of 4'),
    ({'windows': (0,)}, {'windows': (3, 0)}, 'the target has none'),
  ],
)
def test_a_target_that_does_not_fit_is_refused(target, changes, message):
  sizes = toy_assistant.config(TARGET, **changes)
  with pytest.raises(ValueError, match=message):
    families.bind(toy_gemma.gemma_4(V, **target), sizes, width=2)


def test_a_target_of_another_family_is_refused():
  sizes = toy_assistant.config(TARGET)
  with pytest.raises(ValueError, match='Gemma 4'):
    families.bind(toy.llama_config(V), sizes, width=2)


@pytest.mark.slow
@pytest.mark.parametrize(
  ('make', 'expert_dim'),
  [
    (toy_gemma.gemma_4, 0),
    (toy_gemma.gemma_4_e2b, 0),
    # Split by the width of each expert, and by experts: 6 does not divide.
    (toy_gemma.gemma_4_moe, 8),
    (toy_gemma.gemma_4_moe, 6),
  ],
)
def test_devices_share_target_and_assistant(make, expert_dim):
  """Eight: rows over two, and heads, widths and vocabulary over four."""
  sizes = {'num_heads': 8, 'num_kv_heads': 4, 'full_num_kv_heads': 4}
  config = make(16, mlp_dim=16, **sizes)
  config = dataclasses.replace(config, expert_dim=expert_dim)
  own = toy_assistant.config(config)
  target, model = toy_families.networks(config, own, gamma=GAMMA)
  weights = toy_gemma.params(config, seed=1), toy_assistant.params(own, seed=2)
  drafter = drafters.autoregressive(
    drafters.assistant(model),
    is_argmax=True,
    gamma=GAMMA,
    logits_to_probs=decoders.GREEDY,
  )

  def decode(target_params, own_params):
    joined = toy_assistant.joined(target_params, own_params)
    output = jax.jit(
      functools.partial(
        speculative.generate,
        method=Method(
          target=target,
          drafter=drafter,
          logits_to_probs=decoders.GREEDY,
          eos_id=-1,
        ),
        max_len=30,
      )
    )(
      Params(target_params, joined),
      jax.random.key(0),
      toy.prompt([[1, 2, 3], [4], [5, 6, 7, 8, 9], [2, 2]]),
    )
    return decoders.rows(output)

  expected = decode(*weights)
  mesh = mesh_lib.make(num_partitions=4)
  with jax.set_mesh(mesh):
    placed = [
      jax.device_put(params, mesh_lib.parameter_shardings(mesh, params))
      for params in weights
    ]
    assert decode(*placed) == expected
