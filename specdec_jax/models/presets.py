"""Model sizes by the names of papers and checkpoints, from presets.toml."""

import dataclasses
import tomllib
from collections.abc import Mapping
from importlib import resources
from typing import TypeVar

import jax.numpy as jnp

from specdec_jax.launch.spelling import did_you_mean
from specdec_jax.models import families
from specdec_jax.models.drafting.assistant import AssistantConfig
from specdec_jax.models.drafting.block_decoder import BlockDecoderConfig
from specdec_jax.models.drafting.block_layers import BlockDrafterConfig
from specdec_jax.models.drafting.eagle import EagleConfig
from specdec_jax.models.families import AnyConfig, Config
from specdec_jax.models.llama import RopeScaling

_Sizes = TypeVar('_Sizes')
# Dtypes of weights, activations and caches.
DTYPES = ('float32', 'bfloat16')


def _value(value: object) -> object:
  """Converts a value of the file to that of a config's field."""
  if isinstance(value, dict):
    return RopeScaling(**value)
  return tuple(value) if isinstance(value, list) else value


def _read() -> dict[str, AnyConfig]:
  """Reads all sizes from the file, whose header describes its format."""
  file = resources.files('specdec_jax.models').joinpath('presets.toml')
  groups = tomllib.loads(file.read_text(encoding='utf-8'))
  configs = {family.name: family.config for family in families.FAMILIES}
  presets: dict[str, AnyConfig] = {}
  for name, table in groups.items():
    # A group may start from an earlier one, which it names as `like`.
    base = groups.get(table.pop('like', ''), {})
    group = base | table
    groups[name] = group
    # All keys but these are sizes that the group's models share.
    non_sizes = {'family', 'columns', 'models', 'prefix'}
    shared = {key: group[key] for key in group.keys() - non_sizes}
    prefix = table.get('prefix', name)
    for model, row in group.get('models', {}).items():
      # Of columns [a, b], the row [1, 2, {c = 3}] has the sizes a=1, b=2, c=3.
      is_special = isinstance(row[-1], dict)
      special = row[-1] if is_special else {}
      columns = zip(group['columns'], row[: len(row) - is_special], strict=True)
      sizes = shared | dict(columns) | special
      fields = {key: _value(value) for key, value in sizes.items()}
      presets[f'{prefix}_{model}'] = configs[group['family']](**fields)
  return presets


_ALL = _read()
SPEC_DRAFTERS: dict[str, BlockDecoderConfig] = {
  name: config
  for name, config in _ALL.items()
  if isinstance(config, BlockDecoderConfig)
}
# Assistants of Gemma 4, by the name of their target.
ASSISTANTS: dict[str, AssistantConfig] = {
  name: config
  for name, config in _ALL.items()
  if isinstance(config, AssistantConfig)
}
PRESETS: dict[str, Config] = {
  name: config for name, config in _ALL.items() if isinstance(config, Config)
}
# How many tokens EAGLE-3 networks of these names can draft; all other sizes are
# those of their target's layers.
EAGLES = {f'eagle3_{n}k': n * 1024 for n in (4, 8, 16, 32)}
# The slots of a block of DFlash drafters (arXiv 2602.06036) of these names; all
# other sizes are those of their target's layers, or of published drafters.
BLOCKS = {f'dflash_b{n}': n for n in (8, 16)}
_NUM_BLOCK_LAYERS = _NUM_BLOCK_STREAMS = 5


def preset(name: str, *, dtype: jnp.dtype = jnp.float32) -> Config:
  """Looks up a model's sizes in `PRESETS`.

  `dtype` is that of activations and cache. Raises ValueError for an unknown
  name.
  """
  return dataclasses.replace(_named(name, PRESETS), dtype=dtype)


def spec_drafter(
  name: str, *, dtype: jnp.dtype = jnp.float32
) -> BlockDecoderConfig:
  """Looks up a Spec-Drafter's sizes in `SPEC_DRAFTERS`, as `preset`."""
  return dataclasses.replace(_named(name, SPEC_DRAFTERS), dtype=dtype)


def drafter(
  name: str, *, dtype: jnp.dtype = jnp.float32
) -> BlockDecoderConfig | AssistantConfig:
  """Looks up sizes in `SPEC_DRAFTERS` or `ASSISTANTS`, as `preset`."""
  if name in ASSISTANTS:
    return dataclasses.replace(ASSISTANTS[name], dtype=dtype)
  return spec_drafter(name, dtype=dtype)


def eagle(name: str, target: Config, *, dtype: jnp.dtype) -> EagleConfig:
  """Makes the sizes of an EAGLE-3 network for a target.

  `name`, one of `EAGLES`, sets how many tokens can be drafted, at most the
  target's; heads, feed-forward and positions are those of the target's layers.
  Raises ValueError for an unknown name.
  """
  num_drafted = min(_named(name, EAGLES), target.vocab_size)
  # A T5 has no field `num_kv_heads`: every head has keys and values of its own.
  fields = {field.name for field in dataclasses.fields(EagleConfig)}
  sizes = {'num_kv_heads': target.num_heads} | {
    field: value for field, value in vars(target).items() if field in fields
  }
  eagle_sizes = {
    'target_embed_dim': target.embed_dim,
    'draft_vocab_size': num_drafted,
    'fc_norm': True,
    'norm_before_next': True,
    'dtype': dtype,
  }
  return EagleConfig(**sizes | eagle_sizes)


def block(name: str, target: Config, *, dtype: jnp.dtype) -> BlockDrafterConfig:
  """Makes the sizes of a DFlash drafter for a target, as published for Qwen3.

  `name`, one of `BLOCKS`, sets the slots of a block. Streams are the outputs of
  layers from 1 to the third last, evenly spaced; of an encoder-decoder, its
  decoder's. Raises ValueError for an unknown name.
  """
  block_size = _named(name, BLOCKS)
  num_layers = families.num_layers(target)[-1]
  # With 36 layers, the inputs of layers 2, 10, 18, 26 and 34.
  count = min(_NUM_BLOCK_STREAMS, max(num_layers - 3, 1))
  step = max(num_layers - 4, 0) / max(count - 1, 1)
  streams = sorted({round(2 + step * i) for i in range(count)})
  fields = {field.name for field in dataclasses.fields(BlockDrafterConfig)}
  sizes = {'num_kv_heads': target.num_heads} | {
    field: value for field, value in vars(target).items() if field in fields
  }
  # A drafter attends to all positions, whatever its target's windows are.
  sizes.pop('windows', None)
  block_sizes = {
    'draft_vocab_size': target.vocab_size,
    'num_layers': _NUM_BLOCK_LAYERS,
    'block_size': block_size,
    'feature_layers': tuple(streams),
    'sample_from_anchor': False,
    'mask_token_id': 0,
    'has_qk_norm': True,
    'dtype': dtype,
  }
  return BlockDrafterConfig(**sizes | block_sizes)


def _named(name: str, table: Mapping[str, _Sizes]) -> _Sizes:
  if name not in table:
    names = ', '.join(table)
    hint = did_you_mean(name, table)
    raise ValueError(f'unknown preset {name!r}, expected one of {names}{hint}')
  return table[name]
