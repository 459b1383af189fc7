"""Sampled decodes of a real network against its forward pass in numpy: trees,
copied and drawn, and EAGLE's settings."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specdec_jax import drafters, verification
from specdec_jax.base import Params
from specdec_jax.models import families
from specdec_jax.sampling import logits
from tests import toy, toy_eagle, toy_families, toy_tree, trial
from tests.goodness_of_fit import Sampling

V, GAMMA = 4, 3
CONFIG = toy.llama_config(V, num_layers=2)
PARAMS = toy.llama_params(CONFIG, seed=1)
EAGLE = toy_eagle.config(CONFIG)
PROMPTS = ((1, 2, 1, 3, 1), (0, 2), (2, 1, 0))


def forward(params: Any, ids: np.ndarray) -> np.ndarray:
  """float64 logits `[N, T, V]` of ids `[N, T]`, from the description of Llama:
  it knows nothing of `models`, of caches or of ragged rows."""
  params = jax.tree.map(lambda a: np.asarray(a, np.float64), params)
  num_rows, length = ids.shape
  half = CONFIG.head_dim // 2
  frequencies = CONFIG.rope_base ** (-np.arange(half) / half)
  angles = np.arange(length)[:, None, None] * frequencies
  is_seen = np.tri(length, dtype=bool)

  def norm(x, name):
    mean_square = np.mean(x**2, axis=-1, keepdims=True)
    return x / np.sqrt(mean_square + CONFIG.norm_epsilon) * name['scale']

  def heads(x, count):
    return x.reshape(num_rows, length, count, CONFIG.head_dim)

  def rotated(x):
    a, b = x[..., :half], x[..., half:]
    cos, sin = np.cos(angles), np.sin(angles)
    return np.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)

  x = params['token_embedder']['embedding'][ids]
  for i in range(CONFIG.num_layers):
    layer = params[f'layers_{i}']
    own, mlp = layer['self_attention'], layer['mlp']
    y = norm(x, layer['pre_self_attention_layer_norm'])
    queries = rotated(heads(y @ own['query']['kernel'], CONFIG.num_heads))
    keys = rotated(heads(y @ own['key']['kernel'], CONFIG.num_kv_heads))
    values = heads(y @ own['value']['kernel'], CONFIG.num_kv_heads)
    shared = np.arange(CONFIG.num_heads) * CONFIG.num_kv_heads
    shared = shared // CONFIG.num_heads
    scores = np.einsum('nthd,nshd->nhts', queries, keys[:, :, shared])
    scores = np.where(is_seen, scores / np.sqrt(CONFIG.head_dim), -np.inf)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    weights /= weights.sum(-1, keepdims=True)
    mixed = np.einsum('nhts,nshd->nthd', weights, values[:, :, shared])
    x = x + mixed.reshape(num_rows, length, -1) @ own['out']['kernel']
    y = norm(x, layer['pre_mlp_layer_norm'])
    gate = y @ mlp['wi_0']['kernel']
    inner = gate / (1 + np.exp(-gate)) * (y @ mlp['wi_1']['kernel'])
    x = x + inner @ mlp['wo']['kernel']
  return norm(x, params['decoder_norm']) @ params['logits_dense']['kernel']


def _copies(gamma: int, num_continuations: int, sampling: Sampling):
  drafter = drafters.continuations(
    gamma=gamma, num_continuations=num_continuations, min_ngram=1
  )
  rule = toy_tree.rule('target_sample_walk', drafter.tree)
  return families.language_model(CONFIG), drafter, (), rule


def _drawn(tree, sampling: Sampling):
  """A tree from the same network with other weights."""
  target = families.language_model(CONFIG)
  drafter = drafters.branching(
    target, tree=tree, logits_to_probs=_to_probs(sampling)
  )
  params = toy.perturb(PARAMS, seed=2, scale=0.3)
  return target, drafter, params, toy_tree.rule('traversal', tree)


def _eagle(tree, sampling: Sampling, rule=verification.block_verification):
  """One token of four cannot be drafted."""
  gamma = GAMMA if tree is None else len(tree.parents)
  target, network = toy_families.networks(CONFIG, EAGLE, gamma=gamma)
  chain, to_probs = drafters.eagle(network), _to_probs(sampling)
  own = toy_eagle.joined(PARAMS, toy_eagle.params(EAGLE, seed=2))
  if tree is None:
    drafter = drafters.autoregressive(
      chain, gamma=gamma, logits_to_probs=to_probs
    )
    return target, drafter, own, rule
  drafter = drafters.branching(chain, tree=tree, logits_to_probs=to_probs)
  return target, drafter, own, toy_tree.rule('traversal', tree)


def _to_probs(sampling: Sampling):
  return logits.standardize(**sampling._asdict())


T_1, TOP_2 = Sampling(), Sampling(top_k=2)
COOL = Sampling(temperature=0.7, top_k=3)
SETTINGS = {
  '2 copies of 2': (_copies, (2, 2), T_1),
  '3 copies of 1': (_copies, (1, 3), T_1),
  '2 copies of 3, T 0.7, top-k 3': (_copies, (3, 2), COOL),
  'drawn (2, 2)': (_drawn, (toy_tree.shape(2, 2),), T_1),
  'drawn (3, 1, 1)': (_drawn, (toy_tree.shape(3, 1, 1),), T_1),
  'drawn, bent, T 0.7, top-k 3': (_drawn, (toy_tree.BENT,), COOL),
  'EAGLE, T 1': (_eagle, (None,), T_1),
  'EAGLE, top-k 2': (_eagle, (None,), TOP_2),
  'EAGLE, T 0.7, top-k 3': (_eagle, (None,), COOL),
  'EAGLE, tree (2, 2)': (_eagle, (toy_tree.shape(2, 2),), T_1),
  'EAGLE, bent tree, top-k 2': (_eagle, (toy_tree.BENT,), TOP_2),
}


def test_numpy_agrees_with_the_network():
  ids = np.random.default_rng(0).integers(0, V, (5, 9))
  model = toy.compiled(families.language_model(CONFIG))
  cache = model.init(PARAMS, toy.prompt([[0]] * 5), 9)
  found, _ = model.extend(PARAMS, jnp.asarray(ids, jnp.int32), cache)
  np.testing.assert_allclose(found, forward(PARAMS, ids), atol=1e-4)


@pytest.mark.slow
@pytest.mark.proof
@pytest.mark.parametrize('name', SETTINGS)
def test_decodes_have_the_distribution_of_the_forward_pass(
  name, record_property
):
  make, arguments, sampling = SETTINGS[name]
  target, drafter, own, rule = make(*arguments, sampling)
  result = trial.check(
    trial.Trial(
      target=target,
      params=Params(PARAMS, own),
      drafter=drafter,
      verify_fn=rule,
      sampling=sampling,
      prompts=PROMPTS,
      num_new=(4, 4, 3),
      eos_id=3,
      forward=forward,
    ),
    record_property,
    'The compiled loop against a forward pass in numpy',
    name,
    num_decodes=50_400,
  )
  accepted = np.sum(result.statistics.num_accepted)
  assert 0 < accepted < np.sum(result.statistics.num_tested)
