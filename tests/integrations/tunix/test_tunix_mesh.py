"""Rollouts on a mesh of eight devices, against those on one.

They run where Tunix is installed: `make tunix`.
"""

import functools
import re

import jax
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from specdec_jax.assembly import decode_many
from specdec_jax.integrations import tunix as ours
from specdec_jax.integrations.tunix import meshes
from tests import slow

pytest.importorskip('tunix', reason='needs Tunix')
from flax import nnx
from tunix.models.llama3 import model as llama3
from tunix.rl import reshard, rl_cluster
from tunix.rl.grpo import grpo_learner

from tests.integrations.tunix import toy_tunix
from tests.integrations.tunix.test_tunix import (
  GREEDY,
  Config,
  is_same,
)

SETTINGS = (
  Config(**GREEDY),
  Config(seed=5),
  Config(seed=6, temperature=0.7, top_k=6),
)


@pytest.fixture(scope='module', autouse=True)
def promoted():
  # As in `test_tunix`, but in the threads of Tunix's learner too.
  before = {
    name: getattr(jax.config, name)
    for name in ('jax_numpy_rank_promotion', 'jax_numpy_dtype_promotion')
  }
  jax.config.update('jax_numpy_rank_promotion', 'allow')
  jax.config.update('jax_numpy_dtype_promotion', 'standard')
  yield
  for name, value in before.items():
    jax.config.update(name, value)


def mesh_of(*shape: int, names=('fsdp', 'tp'), first=0) -> jax.sharding.Mesh:
  devices = jax.devices()[first : first + np.prod(shape)]
  return jax.sharding.Mesh(np.array(devices).reshape(shape), names)


def engine(model, mesh=None, **options):
  # Of ten prompts, in batches that four devices do not divide.
  options = {'batch_size': 6, 'gamma': 3} | options
  tokenizer = toy_tunix.Tokenizer()
  return ours.SpeculativeRollout(model, tokenizer, mesh=mesh, **options)


def pointers(array) -> list[int]:
  """Where the parts of an array lie in memory."""
  return [
    shard.data.unsafe_buffer_pointer() for shard in array.addressable_shards
  ]


@slow.parametrize(
  ('name', 'shape', 'drafter'),
  [
    ('llama3_tied', (4, 2), 'suffix'),
    ('llama3_tied', (8, 1), 'prompt_lookup'),
    ('gemma3', (4, 2), 'model'),
    ('qwen2', (1, 2), 'suffix'),
  ],
  now=[('llama3_tied', (4, 2), 'suffix'), ('gemma3', (4, 2), 'model')],
)
def test_tokens_are_those_of_one_device(name, shape, drafter):
  model = toy_tunix.make(name)
  options = {'drafter': drafter}
  if drafter == 'model':
    options['draft_model'] = toy_tunix.make('llama3_tied', num_layers=1)
  mesh = mesh_of(*shape)
  alone, split = engine(model, **options), engine(model, mesh, **options)
  for texts in (toy_tunix.prompts(10, longest=8), ['abcdefghijkl', 'a']):
    for config in SETTINGS:
      expected = alone.generate(texts, config)
      with mesh:  # As Tunix calls it.
        found = split.generate(texts, config)
      assert is_same(found, expected)
      for one, other in zip(found.logprobs, expected.logprobs, strict=True):
        np.testing.assert_allclose(one, other, atol=5e-5)


@pytest.mark.parametrize('name', ['llama3_tied', 'gemma3'])
def test_rows_and_caches_are_split(name, monkeypatch):
  given, warm_up = [], decode_many.warm_up
  monkeypatch.setattr(
    decode_many, 'warm_up', lambda *args: given.append(args) or warm_up(*args)
  )
  model = toy_tunix.make(name, hidden_dim=56)
  rollout = engine(model, mesh_of(4, 2))
  rollout.generate(toy_tunix.prompts(10, longest=8), Config())
  programs, params, prompt = given[0]
  # As many as divide, at least 6 in all and a quarter of them anew.
  assert (programs.batch_size, programs.refill_size) == (8, 4)
  with jax.set_mesh(rollout._mesh):
    state = programs.idle(programs.init(params, np.uint32(0), prompt))
    text = programs.run.lower(params, state, np.int32(1)).compile().as_text()
  part = lambda x: x.sharding.shard_shape(x.shape)
  assert part(state.context.tokens)[0] == 2
  for keys in state.target_cache.keys:
    assert keys.shape[:2] == (8, 2)
    assert part(keys)[:2] == (2, 1)
  # Kernels of 16 x 56: activations are sent, not these.
  gathered = re.findall(r'= \(?f32\[([\d,]+)\]\S* all-gather', text)
  assert gathered
  assert not {'16,28', '28,16', '16,56', '56,16'} & set(gathered)


def test_log_probs_are_those_of_the_policy():
  model, mesh = toy_tunix.make('qwen2'), mesh_of(4, 2)
  rollout = engine(model, mesh, gamma=2)
  texts = toy_tunix.prompts(8, longest=8)
  with mesh:
    output = rollout.generate(texts, Config(seed=1))
    rows = np.full((8, 12), rollout.pad_id(), np.int32)
    for row, tokens in zip(rows, output.tokens, strict=True):
      row[: len(tokens)] = tokens
    trained = rollout.get_per_token_logps(
      output.left_padded_prompt_tokens, rows
    )
  for row, found in zip(trained, output.logprobs, strict=True):
    np.testing.assert_allclose(found, row[: len(found)], atol=5e-5)


def test_with_the_constraints_that_tunix_has_on_tpus(monkeypatch):
  def shard(x, axes):
    mesh = llama3.pxla.thread_resources.env.physical_mesh
    if mesh.empty:
      return x
    place = NamedSharding(mesh, PartitionSpec(*axes))
    return jax.lax.with_sharding_constraint(x, place)

  monkeypatch.setattr(llama3, 'shard', shard)
  # Sizes of no other test, whose programs would be used here.
  model, mesh = toy_tunix.make('llama3_tied', hidden_dim=40), mesh_of(4, 2)
  config, texts = Config(temperature=0.7, seed=2), ['abc', 'ba', 'c']
  expected = engine(model).generate(texts, config)
  rollout = engine(model, mesh)
  with mesh:
    # Three rows: Tunix's network takes a multiple of four.
    output = rollout.generate(texts, config)
  assert is_same(output, expected)
  for one, other in zip(output.logprobs, expected.logprobs, strict=True):
    np.testing.assert_allclose(one, other, atol=5e-5)


def test_weights_stay_where_the_trainer_puts_them():
  mesh = mesh_of(4, 2)
  one, other = (toy_tunix.make('qwen3', seed=seed) for seed in (0, 1))
  config, texts = Config(**GREEDY), toy_tunix.prompts(4, longest=8)
  expected = engine(other).generate(texts, config)
  trained = reshard.reshard_model_to_mesh(other, mesh)
  one = reshard.reshard_model_to_mesh(one, mesh)
  rollout = engine(one, mesh)
  assert rollout.model() is one
  before = rollout.generate(texts, config)
  params = nnx.state(trained, nnx.Param)
  with mesh:
    rollout.update_params(params, (nnx.Param,))
    assert is_same(rollout.generate(texts, config), expected)
  pairs = zip(
    jax.tree.leaves(params),
    jax.tree.leaves(nnx.state(rollout.model(), nnx.Param)),
    strict=True,
  )
  for theirs, own in pairs:
    assert own.sharding == theirs.sharding
    assert pointers(own) == pointers(theirs)
  # What has one shape in both packages is one array, in parts.
  kernel = trained.layers[0].mlp.down_proj.kernel.get_value()
  own = rollout._decoder.params.target['layers_0']
  assert pointers(own['mlp']['wo']['kernel']) == pointers(kernel)
  assert kernel.sharding.shard_shape(kernel.shape) == (12, 4)
  copied = own['self_attention']['out']['kernel']
  assert copied.sharding.shard_shape(copied.shape) == (16, 4)
  # From one device, and from another mesh.
  for place in (None, mesh_of(8, 1)):
    source = reshard.reshard_model_to_mesh(toy_tunix.make('qwen3'), place)
    rollout.update_params(nnx.state(source, nnx.Param), (nnx.Param,))
    assert is_same(rollout.generate(texts, config), before)
    assert rollout.model().final_norm.w.get_value().sharding.mesh == mesh


@pytest.mark.parametrize(
  ('names', 'shape', 'expected'),
  [
    (('fsdp', 'tp'), (4, 2), {'data': 4, 'model': 2, 'rest': 1}),
    (('dp', 'fsdp', 'tp'), (2, 2, 2), {'data': 4, 'model': 2, 'rest': 1}),
    (('tp', 'fsdp'), (2, 4), {'rest': 1, 'model': 2, 'data': 4}),
  ],
)
def test_axes(names, shape, expected):
  mesh = mesh_of(*shape, names=names)
  model = toy_tunix.make('llama3_tied')
  assert meshes.of(model).shape == {'data': 1, 'model': 1, 'rest': 1}
  found = meshes.of(reshard.reshard_model_to_mesh(model, mesh))
  assert found.shape == expected
  assert list(found.devices.flat) == list(mesh.devices.flat)


class Padded(toy_tunix.Tokenizer):
  """With padding that has an embedding, since it is trained on, and no BOS."""

  def bos_id(self) -> int:
    return 0

  def pad_id(self) -> int:
    return 1


@pytest.mark.parametrize(
  ('shape', 'first'), [((4, 2), 0), ((2, 2), 4)], ids=['together', 'apart']
)
def test_steps_of_grpo(shape, first):
  # The trainer on the same devices, or on others.
  trainer, mesh = mesh_of(*shape), mesh_of(*shape, first=first)
  roles = rl_cluster.Role
  cluster = rl_cluster.RLCluster(
    actor=toy_tunix.make('llama3_tied'),
    reference=toy_tunix.make('llama3_tied'),
    tokenizer=Padded(),
    cluster_config=rl_cluster.ClusterConfig(
      role_to_mesh={
        roles.ACTOR: trainer,
        roles.REFERENCE: trainer,
        roles.ROLLOUT: mesh,
      },
      rollout_engine=functools.partial(ours.SpeculativeRollout, gamma=3),
      offload_to_cpu=False,
      training_config=rl_cluster.RLTrainingConfig(
        actor_optimizer=optax.adam(1e-2),
        eval_every_n_steps=10,
        max_steps=2,
        mini_batch_size=4,
        train_micro_batch_size=4,
      ),
      rollout_config=Config(kv_cache_size=32),
    ),
  )
  rewards = []

  def reward(prompts, completions, **_):
    rewards.append([float(text.count('a')) for text in completions])
    return rewards[-1]

  learner = grpo_learner.GRPOLearner(
    rl_cluster=cluster,
    algo_config=grpo_learner.GRPOConfig(num_generations=2, beta=0.04),
    reward_fns=reward,
  )
  kernel = lambda: cluster.rollout.model().layers[0].mlp.down_proj.kernel
  before = np.asarray(kernel().get_value())
  texts = np.array(['ab', 'ba', 'abc', 'c'])
  learner.train([{'prompts': texts}] * 2)
  assert [len(row) for row in rewards] == [8, 8]
  assert not np.array_equal(before, np.asarray(kernel().get_value()))
  assert kernel().get_value().sharding.mesh == mesh
