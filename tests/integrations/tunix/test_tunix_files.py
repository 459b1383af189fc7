"""What Tunix writes is read here, and what files hold is used there.

They run where Tunix is installed: `make tunix`.
"""

import functools
import re
import shutil
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest

import specdec_jax
from specdec_jax.assembly import drafters, models
from specdec_jax.assembly.models import Model
from specdec_jax.checkpoints import huggingface
from specdec_jax.integrations import tunix as ours
from specdec_jax.integrations.tunix import networks
from specdec_jax.text import vocabulary_files
from specdec_jax.text.vocabularies import Vocabulary
from tests import slow, toy_eagle

pytest.importorskip('tunix', reason='needs Tunix')
import qwix
import tokenizers
import transformers
from flax import nnx
from tunix.models import safetensors_saver
from tunix.models.gemma3 import params as gemma3
from tunix.models.gemma3 import params_safetensors as gemma3_reader
from tunix.models.llama3 import params as llama3
from tunix.models.qwen3 import params as qwen3
from tunix.rl import rl_cluster
from tunix.rl.grpo import grpo_learner

from tests.integrations.tunix import toy_tunix
from tests.integrations.tunix.test_tunix import (
  GREEDY,
  VOCAB_SIZE,
  Config,
  engine,
  is_same,
  probs_after,
  vanilla,
)
from tests.integrations.tunix.test_tunix_mesh import Padded, mesh_of

_PAGE = Path(__file__).parents[3] / 'docs' / 'rollouts.md'
_READERS = {'llama3': llama3, 'qwen3': qwen3, 'gemma3': gemma3_reader}
_RANK, _ALPHA = 2, 4.0
# Tunix has no function for a Llama 3, whose layers have the names of a Qwen3.
_SAVERS = {
  'llama3': functools.partial(
    safetensors_saver.save_lora_merged_model_as_safetensors,
    state_key_transform_fn=qwen3._qwen3_state_key_to_safetensors_key,
    transpose_rules=qwen3._QWEN3_HUGGINGFACE_TRANSPOSE_RULES,
  ),
  'qwen3': qwen3.save_lora_merged_model_as_safetensors,
  'gemma3': gemma3.save_lora_merged_model_as_safetensors,
}


def letters() -> tokenizers.Tokenizer:
  """The tokens of `toy_tunix.Tokenizer`, without BOS."""
  ids = {'</s>': 0, '<s>': 1}
  ids |= {chr(ord('a') + i): 2 + i for i in range(VOCAB_SIZE - 2)}
  made = tokenizers.Tokenizer(tokenizers.models.WordLevel(ids, unk_token='a'))
  each = tokenizers.Regex('.')
  made.pre_tokenizer = tokenizers.pre_tokenizers.Split(each, 'isolated')
  made.decoder = tokenizers.decoders.Fuse()
  return made


def write(folder: Path, model: nnx.Module) -> Path:
  """Writes a model of Tunix's as Hugging Face lays it out."""
  folder.mkdir()
  vocabulary = Vocabulary(tokenizer=letters(), eos_ids=(0,))
  vocabulary_files.write(folder, vocabulary)
  config = networks.config_of(model)
  huggingface.save(folder, config, networks.arrays_of(model))
  return folder


def assert_reads(folder: Path, model: nnx.Module) -> None:
  """Decodes a folder, and compares all that it finds likely with a model."""
  decoder = specdec_jax.load(folder, gamma=3)
  settings = {'max_new_tokens': 8, 'top_logprobs': VOCAB_SIZE}
  for found in specdec_jax.generate(decoder, ['abcdef', 'q'], **settings):
    row = list(found.context)
    probs = probs_after(model, row)[-len(found.tokens) - 1 : -1]
    assert list(found.tokens) == probs.argmax(axis=-1).tolist()
    for likeliest, expected in zip(found.top_log_probs, probs, strict=True):
      ids, log_probs = zip(*likeliest, strict=True)
      expected = np.log(expected[list(ids)])
      np.testing.assert_allclose(log_probs, expected, atol=1e-4)


@slow.parametrize(
  'name', ('llama3', 'qwen3', 'gemma3'), now=('qwen3', 'gemma3')
)
def test_lora_that_tunix_merged_into_a_folder_is_read(name, tmp_path):
  made = toy_tunix.make(name)
  base, merged = write(tmp_path / 'base', made), tmp_path / 'merged'
  model = _READERS[name].create_model_from_safe_tensors(
    str(base), made.config, dtype=jnp.float32
  )
  kernels = '.*einsum|.*_proj'
  provider = qwix.LoraProvider(module_path=kernels, rank=_RANK, alpha=_ALPHA)
  inputs = model.get_model_input()
  model = qwix.apply_lora_to_model(model, provider, **inputs)
  rng = np.random.default_rng(1)
  draw = lambda x: jnp.asarray(rng.normal(0, 0.3, x.shape), x.dtype)
  nnx.update(model, jax.tree.map(draw, nnx.state(model, nnx.LoRAParam)))
  _SAVERS[name](str(base), str(merged), model, rank=_RANK, alpha=_ALPHA)
  assert_reads(base, made)
  assert_reads(merged, model)
  with pytest.raises(AssertionError):
    assert_reads(merged, made)


@pytest.mark.parametrize('shape', [None, (4, 2)])
def test_a_network_in_a_folder_drafts(shape, tmp_path):
  model, texts = toy_tunix.make('llama3_tied'), toy_tunix.prompts(4, longest=8)
  sizes = toy_eagle.config(networks.config_of(model))
  huggingface.save(tmp_path, sizes, toy_eagle.params(sizes, seed=1))
  named = Model(checkpoint=str(tmp_path), dtype='float32')
  expected = models.read_params(named, sizes)
  options = {'draft_model': tmp_path, 'gamma': 2}
  if is_alone := shape is None:
    options = {'drafter': drafters.Eagle(model=named, gamma=2)}
  else:
    options['mesh'] = mesh_of(*shape)
  rollout = engine(model, **options)
  # With new weights of the policy, its own are what they were.
  for seed in (0, 1):
    other = toy_tunix.make('llama3_tied', seed=seed)
    rollout.update_params(nnx.state(other, nnx.Param), (nnx.Param,))
    theirs = vanilla(other).generate(texts, Config(**GREEDY))
    assert is_same(rollout.generate(texts, Config(**GREEDY)), theirs)
    assert rollout.timed.statistics.num_drafted.sum() > 0
    own = rollout._decoder.params.drafter
    jax.tree.map(np.testing.assert_array_equal, own['eagle'], expected)
    np.testing.assert_array_equal(
      own['token_embedder']['embedding'],
      other.embedder.input_embedding.get_value(),
    )
  if is_alone:
    decoder = ours.load(model, toy_tunix.Tokenizer(), **options)
    told = specdec_jax.generate(decoder, texts, max_new_tokens=12)
    assert [each.text for each in told] == theirs.text


def test_a_draft_model_in_a_folder_has_the_same_vocabulary(tmp_path):
  model = toy_tunix.make('llama3_tied')
  folder = write(tmp_path / 'draft', model)
  with pytest.raises(ValueError, match='needs a tokenizer that lists'):
    engine(model, draft_model=str(folder))
  tokenizer = transformers.PreTrainedTokenizerFast(
    tokenizer_object=letters(), eos_token='</s>', pad_token='<s>'
  )
  load = functools.partial(ours.load, model, tokenizer, gamma=2)
  [found] = specdec_jax.generate(load(draft_model=folder), ['abc'])
  [plain] = specdec_jax.generate(load(drafter='none'), ['abc'])
  assert found.tokens == plain.tokens
  assert found.statistics['alpha'] == 1.0
  tokens = (folder / 'tokenizer.json').read_text().replace('"b"', '"B"')
  (folder / 'tokenizer.json').write_text(tokens)
  with pytest.raises(ValueError, match='id 3 is the first that differs'):
    load(draft_model=folder)


def training(folder: Path, mesh: jax.sharding.Mesh) -> grpo_learner.GRPOLearner:
  """A training that saves each of four steps; `seen` lists its prompts."""
  trainer, roles = mesh_of(2, 2), rl_cluster.Role
  cluster = rl_cluster.RLCluster(
    actor=toy_tunix.make('llama3_tied'),
    tokenizer=Padded(),
    cluster_config=rl_cluster.ClusterConfig(
      role_to_mesh={roles.ACTOR: trainer, roles.ROLLOUT: mesh},
      rollout_engine=functools.partial(
        ours.SpeculativeRollout, drafter='prompt_lookup', gamma=3
      ),
      training_config=rl_cluster.RLTrainingConfig(
        actor_optimizer=optax.adam(1e-2),
        eval_every_n_steps=10,
        max_steps=4,
        checkpoint_root_directory=str(folder),
        checkpointing_options=ocp.CheckpointManagerOptions(
          save_interval_steps=1
        ),
      ),
      rollout_config=Config(seed=5),
    ),
  )
  seen = []

  def reward(prompts, completions, **_):
    seen.append(prompts[0])
    return [float(text.count('a')) for text in completions]

  learner = grpo_learner.GRPOLearner(
    cluster, grpo_learner.GRPOConfig(num_generations=2, beta=0.0), reward
  )
  learner.seen = seen
  return learner


def policy_of(learner: grpo_learner.GRPOLearner) -> list[np.ndarray]:
  state = nnx.state(learner.rl_cluster.actor_trainer.model, nnx.Param)
  return [*map(np.asarray, jax.tree.leaves(state))]


@pytest.mark.parametrize('first', [0, 4], ids=['together', 'apart'])
def test_a_training_that_was_stopped_goes_on(first, tmp_path):
  mesh = mesh_of(2, 2, first=first)
  texts = 'ab', 'ba', 'abc', 'c'
  batches = [{'prompts': np.array([text] * 4)} for text in texts]
  whole = training(tmp_path / 'whole', mesh)
  untrained = policy_of(whole)
  whole.train(batches)
  assert whole.seen == [*texts]
  # What lies there had it been killed during the third step.
  for step in (1, 2):
    shutil.copytree(
      tmp_path / 'whole' / 'actor' / str(step),
      tmp_path / 'stopped' / 'actor' / str(step),
    )
  resumed = training(tmp_path / 'stopped', mesh)
  cluster = resumed.rl_cluster
  assert (cluster.actor_trainer.train_steps, cluster.global_steps) == (2, 2)
  policy = nnx.state(cluster.actor_trainer.model, nnx.Param)
  restored = policy_of(resumed)
  assert not any(map(np.array_equal, restored, untrained))
  if first:
    # The line of the page: Tunix gives the rollout its weights after a step.
    cluster.rollout.update_params(policy, (nnx.Param,))
  own = nnx.state(cluster.rollout.model(), nnx.Param)
  assert all(map(np.array_equal, restored, jax.tree.leaves(own)))
  output = cluster.rollout.generate([*texts], Config(seed=1))
  rows = np.full((4, 12), Padded().pad_id(), np.int32)
  for row, tokens in zip(rows, output.tokens, strict=True):
    row[: len(tokens)] = tokens
  trained = cluster.rollout.get_per_token_logps(
    output.left_padded_prompt_tokens, rows
  )
  for row, found in zip(trained, output.logprobs, strict=True):
    np.testing.assert_allclose(found, row[: len(found)], atol=5e-5)
  resumed.train(batches)
  assert resumed.seen == [*texts[2:]]
  assert cluster.actor_trainer.train_steps == 4
  for one, other in zip(policy_of(resumed), policy_of(whole), strict=True):
    np.testing.assert_allclose(one, other, atol=1e-6)


def test_the_lines_of_the_page_train(capsys):
  _, section = _PAGE.read_text().split('## Three steps of GRPO on a CPU\n')
  block = re.search(r'^```python\n(.*?)^```$', section, re.DOTALL | re.M)
  names: dict = {}
  exec(block[1], names)
  assert names['cluster'].actor_trainer.train_steps == 3
  assert "'tokens_per_target_run'" in capsys.readouterr().out
