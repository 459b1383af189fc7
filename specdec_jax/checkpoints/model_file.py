"""model.json: which network the parameters beside it are of, and its sizes."""

import dataclasses
import json
import os
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from specdec_jax.checkpoints import name_maps
from specdec_jax.checkpoints.huggingface_config import read_json
from specdec_jax.models import block_decoder, block_heads, t5
from specdec_jax.models.block_decoder import BlockDecoderConfig
from specdec_jax.models.block_heads import BlockHeadsConfig
from specdec_jax.models.llama import LlamaConfig
from specdec_jax.models.t5 import T5Config

NAME = 'model.json'
Config = LlamaConfig | T5Config
# Networks that only draft, and are no models by themselves.
DrafterConfig = BlockDecoderConfig | BlockHeadsConfig

_CONFIGS: dict[str, type] = {
  'llama': LlamaConfig,
  't5': T5Config,
  'block_decoder': BlockDecoderConfig,
  'block_heads': BlockHeadsConfig,
}
_DTYPES: dict[str, Any] = {
  'float32': jnp.float32,
  'bfloat16': jnp.bfloat16,
  'float16': jnp.float16,
}


def write(
  folder: str | os.PathLike[str], config: Config | DrafterConfig
) -> None:
  """Writes the sizes into a folder's model.json."""
  settings = dataclasses.asdict(config)
  settings['dtype'] = jnp.dtype(config.dtype).name
  contents = {'network': network_of(config), 'config': settings}
  (Path(folder) / NAME).write_text(
    json.dumps(contents, indent=2) + '\n', encoding='utf-8'
  )


def read(
  path: str | os.PathLike[str], *, dtype: jnp.dtype | None = None
) -> Any:
  """The sizes in a model.json.

  Args:
    path: of the file, or of its folder.
    dtype: of the parameters, activations and cache; None means as written.

  Raises:
    ValueError: if the file is missing or broken, or has fields that the
      network has not.
  """
  path = Path(path)
  if path.is_dir():
    path = path / NAME
  if not path.is_file():
    raise ValueError(f'there is no {path}')
  contents = read_json(path)
  kind, settings = contents.get('network'), contents.get('config')
  if kind not in _CONFIGS or not isinstance(settings, dict):
    raise ValueError(
      f'{path} is of a network {kind!r}; expected {" or ".join(_CONFIGS)}, and '
      'its "config"'
    )
  fields = {field.name: field for field in dataclasses.fields(_CONFIGS[kind])}
  if unknown := sorted(set(settings) - set(fields)):
    raise ValueError(f'{path}: a {kind} has no {", ".join(unknown)}')
  missing = [
    name
    for name, field in fields.items()
    if name not in settings and field.default is dataclasses.MISSING
  ]
  if missing:
    raise ValueError(f'{path} lacks {", ".join(missing)}')
  for name, value in settings.items():
    if not _is_like(value, fields[name]):
      raise ValueError(f'{path}: {name} is {value!r}')
  stored = settings.get('dtype', 'float32')
  if stored not in _DTYPES:
    raise ValueError(
      f'{path}: dtype is {stored!r}, expected {", ".join(_DTYPES)}'
    )
  values = {
    name: tuple(value) if isinstance(value, list) else value
    for name, value in settings.items()
  }
  values['dtype'] = _DTYPES[stored] if dtype is None else dtype
  return _CONFIGS[kind](**values)


def _is_like(value: Any, field: dataclasses.Field) -> bool:
  """Whether JSON holds a value of a field's type."""
  if field.type is int:
    return type(value) is int and value >= 0
  if field.type is float:
    return type(value) in (int, float)
  if field.type is bool:
    return type(value) is bool
  if field.name == 'dtype':
    return isinstance(value, str)
  return isinstance(value, list) and all(isinstance(v, str) for v in value)


def network_of(config: Config | DrafterConfig) -> str:
  """`'t5'`, `'llama'`, `'block_decoder'` or `'block_heads'`."""
  return next(n for n, cls in _CONFIGS.items() if isinstance(config, cls))


def num_layers(config: Config) -> int:
  """Layers of all stacks together."""
  if isinstance(config, T5Config):
    return config.num_encoder_layers + config.num_decoder_layers
  return config.num_layers


def param_shapes(config: Config | DrafterConfig) -> dict[str, Any]:
  """The tree of parameters as `jax.ShapeDtypeStruct`s of the config's dtype."""
  if isinstance(config, T5Config):
    return t5.param_shapes(config)
  if isinstance(config, BlockDecoderConfig):
    return block_decoder.param_shapes(config)
  if isinstance(config, BlockHeadsConfig):
    return block_heads.param_shapes(config)
  return name_maps.nest(
    {
      parameter.path: jax.ShapeDtypeStruct(parameter.shape, config.dtype)
      for parameter in name_maps.llama_parameters(config)
    }
  )
