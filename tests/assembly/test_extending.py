"""Two drafters with weights, added as docs/extending.md says: a file of their
own each, and a row in two tables of the package, which these tests add."""

import importlib
import json
import pathlib
import re
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

pytest.importorskip('safetensors')
pytest.importorskip('sentencepiece')

import specdec_jax
from specdec_jax.assembly.drafters import DRAFTERS
from specdec_jax.base import Context
from specdec_jax.checkpoints import safetensors_model
from specdec_jax.models import families
from specdec_jax.text import vocabulary_files
from tests import toy
from tests.assembly import block_parallel, medusa
from tests.checkpoints.tiny_t5 import T5X
from tests.cli import tiny

V, NUM_NEW, GAMMA = 128, 12, 3
TEXTS = ('live ten dog eight yes jumps then.', 'two over echo.')
TARGET = toy.llama_config(V, num_layers=2, max_positions=100)


class Added(NamedTuple):
  """What a user wrote: a row of each table, and sizes of a network."""

  family: families.Family
  choice: type
  config: object

  @property
  def name(self) -> str:
    return self.family.name


ADDED = {
  'medusa': Added(
    medusa.FAMILY,
    medusa.MedusaHeads,
    medusa.MedusaConfig(vocab_size=V, embed_dim=8, num_heads=GAMMA),
  ),
  'block_parallel': Added(
    block_parallel.FAMILY,
    block_parallel.BlockParallel,
    block_parallel.BlockConfig(
      vocab_size=V,
      embed_dim=8,
      num_layers=2,
      num_heads=2,
      head_dim=4,
      mlp_dim=12,
      feature_layers=(1, 2),
    ),
  ),
}
# The tables in which each has a row; nothing else of the package is touched.
TABLES = (
  ('specdec_jax.models.families', 'FAMILIES'),
  ('specdec_jax.assembly.drafters', 'DRAFTERS'),
)


@pytest.fixture(scope='module')
def folder(tmp_path_factory) -> pathlib.Path:
  """A target, and texts."""
  folder = tmp_path_factory.mktemp('extending')
  safetensors_model.save(
    folder / 'target', TARGET, toy.llama_params(TARGET, seed=0, scale=3.0)
  )
  path = folder / 'target' / vocabulary_files.SENTENCEPIECE
  path.write_bytes((T5X / 'tiny_sp.model').read_bytes())
  path.with_name('tokenizer_config.json').write_text('{"extra_ids": 0}')
  (folder / 'texts.txt').write_text('\n'.join(TEXTS) + '\n')
  lines = [json.dumps({'inputs': text, 'targets': text}) for text in TEXTS]
  (folder / 'task.jsonl').write_text('\n'.join(lines) + '\n')
  return folder


@pytest.fixture(
  params=['block_parallel', pytest.param('medusa', marks=pytest.mark.slow)]
)
def added(request, folder, monkeypatch) -> Added:
  """The rows, and a network of random weights beside the target."""
  made = ADDED[request.param]
  monkeypatch.setattr(families, 'FAMILIES', (*families.FAMILIES, made.family))
  path = f'{made.choice.__module__}:{made.choice.__name__}'
  monkeypatch.setitem(DRAFTERS._paths, made.name, path)
  params = made.family.init_params(made.config, jax.random.key(1))
  safetensors_model.save(folder / made.name, made.config, params)
  return made


def load(folder, name: str, **options):
  path = str(folder / name) if name != 'none' else None
  return specdec_jax.load(
    str(folder / 'target'), drafter=name, draft_model=path, **options
  )


def generated(decoder):
  options = {'max_new_tokens': NUM_NEW, 'batch_size': len(TEXTS)}
  return list(specdec_jax.generate(decoder, TEXTS, **options))


def test_python_and_flags_decode_with_it(added, folder, capfd):
  plain = generated(load(folder, 'none'))
  found = generated(load(folder, added.name, gamma=GAMMA))
  assert [each.tokens for each in found] == [each.tokens for each in plain]
  assert sum(each.statistics['drafted'] for each in found) > 0

  result = tiny.run(
    capfd, 'generate', '--model', folder / 'target', '--drafter', added.name,
    '--draft_model', folder / added.name, '--gamma', GAMMA, '--prompts',
    folder / 'texts.txt', '--max_new_tokens', NUM_NEW, '--temperature', 0,
    '--batch_size', len(TEXTS), '--json', '-',
  )  # fmt: skip
  assert result.status == 0, result.err
  for record, each in zip(result.records(), found, strict=True):
    assert record['tokens'] == list(each.tokens)
    assert record['statistics']['drafted'] == each.statistics['drafted']


def test_a_draft_depends_on_the_text_alone(added, folder):
  """Not on the calls in which it was read: what was rejected leaves nothing."""
  decoder = load(folder, added.name, gamma=GAMMA)
  target, drafter = decoder.target, decoder.drafter
  params = decoder.params
  tokens = jnp.asarray(np.random.default_rng(0).integers(3, 40, (2, 14)))
  keys = jax.random.split(jax.random.key(0), 2)

  def begun(length: int):
    """The caches of target and drafter after a prompt of the first tokens."""
    prompt = toy.prompt([row[:length] for row in tokens.tolist()], width=length)
    cache = target.init(params.target, prompt, 20)
    return drafter.init(params.drafter, prompt, 20, cache)

  @jax.jit
  def draft(state, cache, length):
    context = Context(tokens=tokens, lengths=jnp.full(2, length))
    cache = target.rewind(cache, context.lengths - 1)
    found, state = drafter.propose(params.drafter, keys, context, state, cache)
    return found.tokens, state

  expected, _ = draft(*begun(7), 7)
  for wrong in (0, 1):
    state, cache = begun(5)
    _, state = draft(state, cache, 5)
    # Tokens 4 and 5 are right; what is read behind them was drafted wrongly.
    block = tokens[:, 4:8].at[:, 2:].add(wrong)
    _, cache = target.extend(params.target, block, cache)
    found, _ = draft(state, cache, 7)
    np.testing.assert_array_equal(found, expected)


def test_it_touches_two_files_of_the_package(added):
  """A row in a table each; its own file is a user's."""
  rows = (added.family, added.name)
  for (module, table), row in zip(TABLES, rows, strict=True):
    assert row in getattr(importlib.import_module(module), table)
  assert len(TABLES) <= 3
  package = pathlib.Path(specdec_jax.__file__).parent
  word = re.compile(rf'\b{added.name}\b')
  assert not [
    path
    for path in package.rglob('*.py')
    if word.search(path.read_text(encoding='utf-8'))
  ]
