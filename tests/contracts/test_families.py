"""What every family of networks promises, and that a new one is a row.

The family that is added here is no network at all, but a table of logits by the
last token: nothing outside of this file knows of it.
"""

import ast
import dataclasses
import functools
import pathlib

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specdec_jax import lazy
from specdec_jax.base import Array, Prompt
from specdec_jax.checkpoints import loading, model_file, safetensors_model
from specdec_jax.models import families, presets
from specdec_jax.models.drafting.block_layers import BlockDrafterConfig
from specdec_jax.models.drafting.eagle import EagleConfig
from specdec_jax.models.families import Family
from specdec_jax.text import prompts
from tests import toy, toy_assistant, toy_gemma, toy_t5
from tests.cli import tiny

PACKAGE = pathlib.Path(families.__file__).parent.parent
CONFIGS = {
  'llama': toy.llama_config(7, num_layers=3, has_attention_bias=True),
  'llama, later': toy.llama_config(7, **toy.LATER_LLAMA),
  'llama, experts': toy.llama_config(7, **toy.EXPERTS),
  't5': toy_t5.config(7, num_layers=2),
  't5, scalable': toy_t5.config(7, num_layers=2, has_layer_relpos=True),
  't5, decoder only': toy_t5.config(7, num_encoder_layers=0, is_tied=True),
  'gemma': toy_gemma.decoder(7, num_layers=3),
  'gemma4': toy_gemma.gemma_4(7),
  'gemma4, E2B': toy_gemma.gemma_4_e2b(7),
  'gemma4, experts': toy_gemma.gemma_4_moe(7),
  't5gemma': toy_gemma.encoder_decoder(7, num_encoder_layers=3),
  'block_decoder': dataclasses.replace(
    presets.spec_drafter('mini_2_2'), num_encoder_layers=3
  ),
  'eagle': EagleConfig(
    vocab_size=7,
    draft_vocab_size=5,
    embed_dim=8,
    target_embed_dim=6,
    num_heads=2,
    num_kv_heads=1,
    head_dim=4,
    mlp_dim=4,
    feature_layers=(1, 3),
    fc_norm=True,
    has_embedding=True,
  ),
  'assistant': toy_assistant.clustered(toy_gemma.gemma_4(6)),
  'block_drafter': BlockDrafterConfig(
    vocab_size=7,
    draft_vocab_size=5,
    embed_dim=8,
    num_layers=2,
    num_heads=2,
    num_kv_heads=1,
    head_dim=4,
    mlp_dim=4,
    block_size=3,
    feature_layers=(1, 3),
    cross_layers=(0, 2),
    cross_num_heads=2,
    cross_head_dim=4,
    markov_rank=3,
    markov_head='gated',
  ),
}
# Networks of extras, which only draft.
OF_EXTRAS = {}
for rows in lazy.installed('tests.contrib.block_heads.contract_rows:FAMILIES'):
  OF_EXTRAS |= rows
CONFIGS |= OF_EXTRAS


@dataclasses.dataclass(frozen=True, kw_only=True)
class TableConfig:
  """Sizes of a table `[V, V]` of logits by the last token."""

  vocab_size: int
  is_tied: bool = False
  dtype: jnp.dtype = jnp.float32


class Table(nn.Module):
  config: TableConfig

  @nn.compact
  def __call__(self, tokens: Array) -> Array:
    size = self.config.vocab_size
    return self.param('table', nn.initializers.normal(3.0), (size, size))[
      tokens
    ]


def _init_table(config: TableConfig, rng_key: Array):
  return Table(config).init(rng_key, jnp.zeros((1, 1), jnp.int32))['params']


def _table_model(config: TableConfig):
  """The cache is the lengths, in the smallest Llama's."""
  plain = toy.llama(config.vocab_size)

  def init(params, prompt: Prompt, max_len: int):
    del params, max_len
    return prompt.decoder_lengths - 1

  def extend(params, tokens: Array, cache: Array, at: Array | None = None):
    logits = params['table'][tokens].astype(jnp.float32)
    if at is not None:
      logits = jnp.take_along_axis(logits, at[:, None, None], axis=1)
    return logits, cache + tokens.shape[1]

  return plain._replace(
    init=init,
    extend=extend,
    rewind=lambda cache, lengths: lengths,
    gather=None,
  )


TABLE = Family(
  name='table',
  config=TableConfig,
  init_params=_init_table,
  language_model=_table_model,
  starts=(3,),
  max_positions=lambda config: 100,
)


@pytest.fixture
def table_folder(tmp_path, monkeypatch) -> str:
  """A model of the added family, with a vocabulary."""
  monkeypatch.setattr(families, 'FAMILIES', (*families.FAMILIES, TABLE))
  folder = tmp_path / 'table'
  folder.mkdir()
  config = TableConfig(vocab_size=len(tiny.make_tokens()))
  params = _init_table(config, jax.random.key(4))
  # Specials are never the likeliest.
  params['table'] = params['table'].at[:, : len(tiny.SPECIALS)].add(-99.0)
  safetensors_model.save(folder, config, params)
  words = tiny.write_model(tmp_path / 'words')
  for name in ('tokenizer.json', 'tokenizer_config.json'):
    (folder / name).write_bytes((pathlib.Path(words) / name).read_bytes())
  return str(folder)


def test_an_added_family_is_read_and_packed(table_folder):
  loaded = loading.load(table_folder)
  assert families.of(loaded.config) is TABLE
  assert loaded.description.endswith(' 0 layers, 264 tokens')
  [batch] = prompts.batches(
    ['ab'],
    prompts.encode(
      loaded.vocabulary, ['ab'], config=loaded.config, is_chat=False
    ),
    config=loaded.config,
    batch_size=1,
    max_new_tokens=[4],
    num_rows=1,
  )
  assert batch.prompt.decoder_tokens[0, 0] == 3


@pytest.mark.parametrize(
  'drafter', [['none'], ['prompt_lookup', '--gamma', '2'], None]
)
def test_an_added_family_is_had_from_the_command_line(
  capfd, table_folder, drafter
):
  options = ['--drafter', *drafter] if drafter else []
  if drafter is None:
    options = ['--draft_model', table_folder, '--gamma', '2']
  result = tiny.run(
    capfd, 'generate', '--model', table_folder, '--prompt', 'ab', *options,
    '--max_new_tokens', '8', '--temperature', '0', '--json', '-',
  )  # fmt: skip
  assert result.status == 0, result.err
  [record] = result.records()
  model = loading.load(table_folder)
  token, expected = model.vocabulary.encode('ab')[-1], []
  for _ in range(8):
    token = int(np.argmax(model.params['table'][token]))
    expected.append(token)
  assert record['text'] == model.vocabulary.decode(expected)


@pytest.mark.parametrize('name', CONFIGS)
def test_shapes_are_those_that_are_drawn(name):
  config = CONFIGS[name]
  drawn = jax.eval_shape(
    functools.partial(families.init_params, config), jax.random.key(0)
  )
  shapes = families.param_shapes(config, jnp.bfloat16)
  assert jax.tree.map(lambda leaf: leaf.shape, shapes) == jax.tree.map(
    lambda leaf: leaf.shape, drawn
  )
  dtypes = {jnp.dtype('float32'): jnp.bfloat16, jnp.dtype('int32'): jnp.int32}
  assert jax.tree.map(lambda leaf: leaf.dtype, shapes) == jax.tree.map(
    lambda leaf: jnp.dtype(dtypes[leaf.dtype]), drawn
  )


@pytest.mark.parametrize('name', CONFIGS)
def test_sizes_are_written_and_read(name, tmp_path):
  model_file.write(tmp_path, CONFIGS[name])
  assert model_file.read(tmp_path) == CONFIGS[name]


def test_layers_are_told_stack_by_stack():
  expected = {
    'llama': (3,),
    'llama, later': (2,),
    'llama, experts': (2,),
    't5': (2, 2),
    't5, scalable': (2, 2),
    't5, decoder only': (1,),
    'gemma': (3,),
    'gemma4': (3,),
    'gemma4, E2B': (4,),
    'gemma4, experts': (3,),
    't5gemma': (3, 2),
    'block_decoder': (3, 2),
    'eagle': (),
    'assistant': (),
    'block_drafter': (),
  } | dict.fromkeys(OF_EXTRAS, ())
  found = {name: families.num_layers(c) for name, c in CONFIGS.items()}
  assert found == expected


@pytest.mark.parametrize(
  ('target', 'drafter', 'message'),
  [('llama', 't5', 'whole model'), ('eagle', 'eagle', 'eagle only')],
)
def test_what_is_not_bound_to_a_target(target, drafter, message):
  with pytest.raises(ValueError, match=message):
    families.bind(CONFIGS[target], CONFIGS[drafter], width=2)


def test_what_only_drafts_is_no_language_model(monkeypatch):
  for name in ('eagle', *OF_EXTRAS):
    with pytest.raises(ValueError, match=f'{name} only'):
      families.language_model(CONFIGS[name])
  table = TableConfig(vocab_size=4)
  with pytest.raises(ValueError, match='TableConfig'):
    families.of(table)
  monkeypatch.setattr(families, 'FAMILIES', (*families.FAMILIES, TABLE))
  with pytest.raises(ValueError, match='no streams'):
    families.bind(table, CONFIGS['eagle'], width=2)


# A file format and a training recipe that are for one network.
_OF_ONE_NETWORK = {
  'checkpoints/gguf/__init__.py',
  'training/eagle.py',
  'training/losses.py',
  'training/recipes.py',
}


def test_networks_are_not_told_apart_by_type():
  configs = {family.config.__name__ for family in families.FAMILIES}
  configs |= {'Config', 'DrafterConfig', 'AnyConfig'}
  found = []
  for path in sorted(PACKAGE.rglob('*.py')):
    name = path.relative_to(PACKAGE).as_posix()
    if name in _OF_ONE_NETWORK or name.startswith('models/'):
      continue
    for node in ast.walk(ast.parse(path.read_text(encoding='utf-8'))):
      if isinstance(node, ast.Call) and ast.unparse(node.func) == 'isinstance':
        names = {
          getattr(each, 'id', getattr(each, 'attr', None))
          for each in ast.walk(node.args[1])
        }
        if names & configs:
          found.append(f'{name}, line {node.lineno}')
  assert not found
