"""model.json: which network the parameters beside it are of, and its sizes."""

import dataclasses
import json
from pathlib import Path
from typing import Any, get_args

import jax.numpy as jnp

from specdec_jax.files import replacing, settings
from specdec_jax.files.settings import Json, Settings
from specdec_jax.models import families, layers, quantized
from specdec_jax.models.families import AnyConfig
from specdec_jax.models.products import Weights

NAME = 'model.json'
_DTYPES = ('float32', 'bfloat16', 'float16')
# Counts of what a network may lack: a T5 its encoder, a block drafter a head,
# a Gemma 4 much.
_MAY_BE_0 = frozenset((
  'num_encoder_layers', 'num_shared_layers', 'per_layer_dim',
  'per_layer_vocab_size', 'num_clusters', 'num_chosen_clusters',
  'num_experts', 'num_chosen_experts', 'expert_dim',
  'markov_rank', 'cross_num_heads', 'cross_head_dim',
))  # fmt: skip


def write(folder: Path, config: AnyConfig, weights: str | None = None) -> None:
  """Writes the sizes into a folder's model.json, whole or not at all; `weights`
  is how those beside it are packed, as `quantized.bits_of` reads it."""
  fields = dataclasses.asdict(config)
  # JSON has no dtypes; all other fields are numbers, strings, flags and lists.
  fields['dtype'] = jnp.dtype(config.dtype).name
  # The cache's dtype is a choice of decoding, not the model's.
  fields.pop('cache_dtype', None)
  contents = {'network': families.of(config).name, 'config': fields}
  contents |= {'weights': weights} if weights else {}
  replacing.write_text(folder / NAME, json.dumps(contents, indent=2) + '\n')


def read(path: Path, *, dtype: jnp.dtype | None = None) -> Any:
  """Returns the sizes in a model.json, given its path or its folder's; `dtype`
  None means as written. ValueError if the file is missing or broken."""
  if path.is_dir():
    path = path / NAME
  contents = settings.read(path)
  kind, stated = contents.text('network', ''), contents.at('config')
  classes = {family.name: family.config for family in families.FAMILIES}
  if kind not in classes:
    contents.refuse('network', ' or '.join(classes))
  values = _read_fields(stated, classes[kind])
  if dtype is not None:
    values['dtype'] = dtype
  for key in contents.values.keys() - {'network', 'config', 'weights'}:
    contents.refuse(key, 'network, config and weights alone')
  return contents.build(classes[kind], **values)


def read_weights(folder: Path) -> str | None:
  """Reads how the weights beside model.json are packed; None if whole."""
  stated = settings.read(folder / NAME)
  if not stated.has('weights'):
    return None
  text = stated.text('weights')
  stated.build(quantized.bits_of, text=text)
  return text


def param_shapes(config: AnyConfig, weights: str | None) -> Weights:
  """Returns `families.param_shapes`, packed as stored: each in 8 bits."""
  shapes = families.param_shapes(config)
  if weights is None:
    return shapes
  bits = quantized.bits_of(weights)._replace(bits=8)
  packed: Weights = quantized.packed(shapes, bits)
  return packed


def _read_fields(stated: Settings, cls: type) -> Json:
  """Returns the fields that are stated; the class itself refuses others."""
  types = {field.name: field.type for field in dataclasses.fields(cls)}
  return {
    name: _read_field(stated, name, types[name]) if name in types else value
    for name, value in stated.values.items()
    if value is not None
  }


def _read_field(stated: Settings, name: str, kind: Any) -> Any:
  """Returns the value of a field, of the type that it has in its class."""
  if name == 'dtype':
    if stated.text(name) not in _DTYPES:
      stated.refuse(name, ' or '.join(_DTYPES))
    return getattr(jnp, stated.text(name))
  if name == 'mlp_activations':
    found = stated.texts(name)
    if not found or not set(found) <= set(layers.ACTIVATIONS):
      stated.refuse(name, f'a list of {", ".join(layers.ACTIVATIONS)}')
    return tuple(found)
  cls: Any
  # `RopeScaling | None` has one dataclass among its members.
  for cls in filter(dataclasses.is_dataclass, get_args(kind)):
    within = stated.at(name)
    return within.build(cls, **_read_fields(within, cls))
  if kind == tuple[int, ...]:
    return tuple(stated.counts(name))
  if kind is bool:
    return stated.flag(name)
  if kind is float:
    may_be_0 = name.endswith(('_rate', '_softcap'))
    return stated.number(name) if may_be_0 else stated.positive(name)
  if kind is str:
    return stated.text(name)
  least = 0 if name in _MAY_BE_0 else 1
  most = settings.MOST.get(name, settings.MAX_COUNT)
  return stated.count(name, least=least, most=most)
