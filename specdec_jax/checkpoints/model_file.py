"""model.json: the name and the sizes of the network of a checkpoint."""

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
# Counts that may be 0: a T5 may lack its encoder, a block drafter its head, and
# a Gemma 4 experts, shared layers and per-layer embeddings.
_MAY_BE_0 = frozenset((
  'num_encoder_layers', 'num_shared_layers', 'per_layer_dim',
  'per_layer_vocab_size', 'num_clusters', 'num_chosen_clusters',
  'num_experts', 'num_chosen_experts', 'expert_dim',
  'markov_rank', 'cross_num_heads', 'cross_head_dim',
))  # fmt: skip


def write(folder: Path, config: AnyConfig, weights: str | None = None) -> None:
  """Writes the sizes into a folder's model.json, atomically; `weights` is the
  quantization of its parameters, as `quantized.bits_of` reads it."""
  fields = dataclasses.asdict(config)
  # JSON has no dtypes; all other fields are numbers, strings, flags and lists.
  fields['dtype'] = jnp.dtype(config.dtype).name
  # The cache's dtype is a choice of decoding, not the model's.
  fields.pop('cache_dtype', None)
  contents = {'network': families.of(config).name, 'config': fields}
  contents |= {'weights': weights} if weights else {}
  replacing.write_text(folder / NAME, json.dumps(contents, indent=2) + '\n')


def read(path: Path, *, dtype: jnp.dtype | None = None) -> Any:
  """Returns the config in a model.json, from its path or its folder's; `dtype`
  None keeps the stored one. ValueError if the file is missing or broken."""
  if path.is_dir():
    path = path / NAME
  contents = settings.read(path)
  network = contents.text('network', '')
  fields = contents.at('config')
  classes = {family.name: family.config for family in families.FAMILIES}
  if network not in classes:
    contents.refuse('network', ' or '.join(classes))
  values = _read_fields(fields, classes[network])
  if dtype is not None:
    values['dtype'] = dtype
  for key in contents.values.keys() - {'network', 'config', 'weights'}:
    contents.refuse(key, 'network, config and weights alone')
  return contents.build(classes[network], **values)


def read_weights(folder: Path) -> str | None:
  """Reads the quantization that model.json states; None if unquantized."""
  contents = settings.read(folder / NAME)
  if not contents.has('weights'):
    return None
  text = contents.text('weights')
  contents.build(quantized.bits_of, text=text)
  return text


def param_shapes(config: AnyConfig, weights: str | None) -> Weights:
  """Returns `families.param_shapes`, quantized as stored: 8 bits a value."""
  shapes = families.param_shapes(config)
  if weights is None:
    return shapes
  bits = quantized.bits_of(weights)._replace(bits=8)
  packed: Weights = quantized.packed(shapes, bits)
  return packed


def _read_fields(fields: Settings, cls: type) -> Json:
  """Returns the fields of a config; its class itself refuses unknown ones."""
  types = {field.name: field.type for field in dataclasses.fields(cls)}
  return {
    name: _read_field(fields, name, types[name]) if name in types else value
    for name, value in fields.values.items()
    if value is not None
  }


def _read_field(fields: Settings, name: str, field_type: Any) -> Any:
  """Returns the value of a field, read as the type that its class declares."""
  if name == 'dtype':
    if fields.text(name) not in _DTYPES:
      fields.refuse(name, ' or '.join(_DTYPES))
    return getattr(jnp, fields.text(name))
  if name == 'mlp_activations':
    activations = fields.texts(name)
    if not activations or not set(activations) <= set(layers.ACTIVATIONS):
      fields.refuse(name, f'a list of {", ".join(layers.ACTIVATIONS)}')
    return tuple(activations)
  cls: Any
  # `RopeScaling | None` has one dataclass among its members.
  for cls in filter(dataclasses.is_dataclass, get_args(field_type)):
    inner = fields.at(name)
    return inner.build(cls, **_read_fields(inner, cls))
  if field_type == tuple[int, ...]:
    return tuple(fields.counts(name))
  if field_type is bool:
    return fields.flag(name)
  if field_type is float:
    may_be_0 = name.endswith(('_rate', '_softcap'))
    return fields.number(name) if may_be_0 else fields.positive(name)
  if field_type is str:
    return fields.text(name)
  least = 0 if name in _MAY_BE_0 else 1
  most = settings.MOST.get(name, settings.MAX_COUNT)
  return fields.count(name, least=least, most=most)
