"""Llama-type models from Hugging Face folders, and back."""

import concurrent.futures
import json
import os
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

from specdec_jax.base import Array
from specdec_jax.checkpoints import name_maps
from specdec_jax.checkpoints.huggingface_config import read_config, read_json
from specdec_jax.data.vocabularies import Vocabulary, import_tokenizers
from specdec_jax.models.llama import LlamaConfig

_SINGLE_FILE = 'model.safetensors'
_INDEX = 'model.safetensors.index.json'
_FLOATS = ('F64', 'F32', 'F16', 'BF16')


def load_llama(
  folder: str | os.PathLike[str], *, dtype: jnp.dtype = jnp.float32
) -> tuple[LlamaConfig, dict[str, Any], Vocabulary]:
  """Reads a model and its vocabulary from a folder.

  Args:
    folder: with config.json, safetensors and tokenizer.json.
    dtype: of the parameters, activations and cache.

  Returns:
    Sizes, parameters for `models.llama.Llama`, and the vocabulary.

  Raises:
    ValueError: if a file is missing or broken, or if the network is not the one
      that `models.llama` computes.
  """
  config = read_config(folder, dtype=dtype)
  vocabulary = read_vocabulary(folder)
  return config, read_params(folder, config), vocabulary


def read_params(
  folder: str | os.PathLike[str], config: LlamaConfig
) -> dict[str, Any]:
  """The parameters in a folder's safetensors, of one file or several.

  Args:
    folder: with model.safetensors, or model.safetensors.index.json and the
      files that it names.
    config: their sizes; parameters get its dtype.

  Returns:
    The tree of `models.llama.Llama`.

  Raises:
    ValueError: if a file or a tensor is missing, or a tensor is unexpected, of
      another shape, not floating point, or not finite.
  """
  folder = Path(folder)
  handles = _open_tensors(folder)
  if config.num_layers > len(handles):
    raise ValueError(
      f'{folder} has {len(handles)} tensors, too few for {config.num_layers} '
      'layers'
    )
  parameters = name_maps.llama_parameters(config)
  _check_names(folder, config, parameters, set(handles))
  for parameter in parameters:
    tensor = handles[parameter.huggingface].get_slice(parameter.huggingface)
    if tuple(tensor.get_shape()) != parameter.file_shape:
      raise ValueError(
        f'{folder}: tensor {parameter.huggingface} is {tensor.get_shape()}, '
        f'expected {list(parameter.file_shape)}'
      )
    if tensor.get_dtype() not in _FLOATS:
      raise ValueError(
        f'{folder}: tensor {parameter.huggingface} is stored as '
        f'{tensor.get_dtype()}, expected one of {", ".join(_FLOATS)}'
      )

  def read(parameter: name_maps.Parameter) -> Array:
    name = parameter.huggingface
    values = handles[name].get_tensor(name).astype(np.float32)
    if not name_maps.is_all_finite(values):
      raise ValueError(f'{folder}: tensor {name} holds a NaN or an infinity')
    return name_maps.to_device(values, parameter, config.dtype)

  num_threads = min(8, os.cpu_count() or 1)
  with concurrent.futures.ThreadPoolExecutor(num_threads) as pool:
    arrays = list(pool.map(read, parameters))
  return name_maps.nest(
    {p.path: array for p, array in zip(parameters, arrays, strict=True)}
  )


def _open_tensors(folder: Path) -> dict[str, Any]:
  """The open file of every tensor name."""
  safetensors = _import_safetensors()
  index_path = folder / _INDEX
  names_of_file: dict[str, list[str]] = {}
  if (folder / _SINGLE_FILE).is_file():
    names_of_file[_SINGLE_FILE] = []  # All that are in it.
  elif index_path.is_file():
    file_of_name = read_json(index_path).get('weight_map')
    if not isinstance(file_of_name, dict):
      raise ValueError(f'{index_path} has no weight_map')
    for name, file_name in file_of_name.items():
      names_of_file.setdefault(file_name, []).append(name)
  else:
    raise ValueError(
      f'{folder} has no weights: expected {_SINGLE_FILE} or {_INDEX}'
    )
  handles = {}
  for file_name, names in names_of_file.items():
    path = folder / file_name
    if not path.is_file():
      raise ValueError(
        f'{folder} lacks {file_name}, which {_INDEX} names for '
        f'{len(names)} tensors'
      )
    try:
      handle = safetensors.safe_open(path, framework='np')
    except (safetensors.SafetensorError, OSError) as error:
      raise ValueError(
        f'{path} is no complete safetensors file: {error}'
      ) from error
    present = set(handle.keys())
    absent = set(names) - present
    if absent:
      raise ValueError(f'{path} lacks tensors: {_some(absent)}')
    handles.update(dict.fromkeys(names or present, handle))
  return handles


def _check_names(
  folder: Path,
  config: LlamaConfig,
  parameters: tuple[name_maps.Parameter, ...],
  present: set[str],
) -> None:
  expected = {p.huggingface for p in parameters}
  missing = expected - present
  if missing:
    raise ValueError(f'{folder} lacks tensors: {_some(missing)}')
  unexpected = {
    name for name in present - expected if not name.endswith('.inv_freq')
  }
  if config.is_tied:
    unexpected.discard('lm_head.weight')
  if unexpected:
    raise ValueError(
      f'{folder} has tensors that this network has not: {_some(unexpected)}'
    )


def _some(names: set[str]) -> str:
  shown = sorted(names)[:4]
  more = f' and {len(names) - len(shown)} more' if len(names) > 4 else ''
  return ', '.join(shown) + more


def read_vocabulary(folder: str | os.PathLike[str]) -> Vocabulary:
  """The vocabulary of a folder: tokenizer.json and what stands beside it.

  End-of-text ids come from generation_config.json, else config.json, else from
  the tokenizer's own end token.

  Args:
    folder: with tokenizer.json.

  Raises:
    ValueError: if tokenizer.json is missing or broken.
    ImportError: if the tokenizers package is not installed.
  """
  folder = Path(folder)
  path = folder / 'tokenizer.json'
  if not path.is_file():
    raise ValueError(f'{folder} has no tokenizer.json')
  tokenizers = import_tokenizers()
  try:
    tokenizer = tokenizers.Tokenizer.from_file(str(path))
  except Exception as error:  # The package raises bare exceptions.
    raise ValueError(f'{path} cannot be read: {error}') from error
  settings = _read_json_if_any(folder / 'tokenizer_config.json')
  eos_token = _token_text(settings.get('eos_token'))
  eos_ids = None
  for name in ('generation_config.json', 'config.json'):
    if eos_ids is None:
      eos_ids = _read_json_if_any(folder / name).get('eos_token_id')
  if eos_ids is None and eos_token is not None:
    eos_ids = tokenizer.token_to_id(eos_token)
  if eos_ids is None:
    eos_ids = []
  return Vocabulary(
    tokenizer=tokenizer,
    eos_ids=tuple(eos_ids if isinstance(eos_ids, list) else [eos_ids]),
    bos_token=_token_text(settings.get('bos_token')),
    eos_token=eos_token,
    chat_template=_read_chat_template(folder, settings),
  )


def _token_text(token: Any) -> str | None:
  return token.get('content') if isinstance(token, dict) else token


def _read_chat_template(folder: Path, settings: dict[str, Any]) -> str | None:
  path = folder / 'chat_template.jinja'
  if path.is_file():
    return path.read_text(encoding='utf-8')
  template = settings.get('chat_template')
  if isinstance(template, list):
    by_name = {item['name']: item['template'] for item in template}
    return by_name.get('default')
  return template


def save_llama(
  folder: str | os.PathLike[str],
  config: LlamaConfig,
  params: dict[str, Any],
  *,
  tokenizer_json: str | None = None,
) -> None:
  """Writes a folder that this module and transformers read.

  Args:
    folder: made if it does not exist; files in it are overwritten.
    config: sizes.
    params: the tree of `models.llama.Llama`; tensors keep its dtype.
    tokenizer_json: text of tokenizer.json, or None to write none.

  Raises:
    ValueError: if a parameter is missing or of another shape.
  """
  safetensors_numpy = _import_safetensors().numpy
  folder = Path(folder)
  tensors = {}
  for parameter in name_maps.llama_parameters(config):
    values = np.asarray(name_maps.leaf_at(params, parameter.path))
    if values.shape != parameter.shape:
      raise ValueError(
        f'{"/".join(parameter.path)} is {list(values.shape)}, expected '
        f'{list(parameter.shape)}'
      )
    tensors[parameter.huggingface] = np.ascontiguousarray(
      values.T if parameter.is_transposed else values
    )
  folder.mkdir(parents=True, exist_ok=True)
  safetensors_numpy.save_file(
    tensors, folder / _SINGLE_FILE, metadata={'format': 'pt'}
  )
  settings = _settings(config, tensors['model.norm.weight'].dtype.name)
  (folder / 'config.json').write_text(
    json.dumps(settings, indent=2) + '\n', encoding='utf-8'
  )
  if tokenizer_json is not None:
    (folder / 'tokenizer.json').write_text(tokenizer_json, encoding='utf-8')


def _settings(config: LlamaConfig, dtype: str) -> dict[str, Any]:
  """What config.json says of a model; biases make it a Qwen2."""
  kind = 'qwen2' if config.has_attention_bias else 'llama'
  return {
    'architectures': [f'{kind.capitalize()}ForCausalLM'],
    'model_type': kind,
    'torch_dtype': dtype,
    'vocab_size': config.vocab_size,
    'hidden_size': config.embed_dim,
    'intermediate_size': config.mlp_dim,
    'num_hidden_layers': config.num_layers,
    'num_attention_heads': config.num_heads,
    'num_key_value_heads': config.num_kv_heads,
    'head_dim': config.head_dim,
    'hidden_act': 'silu',
    'rms_norm_eps': config.norm_epsilon,
    'rope_theta': config.rope_base,
    'rope_scaling': None,
    'max_position_embeddings': config.max_positions,
    'tie_word_embeddings': config.is_tied,
  }


def download(repository: str) -> Path:
  """Downloads a model from the Hugging Face hub, or finds it in its cache.

  Args:
    repository: `organisation/name`.

  Returns:
    The folder with its files.

  Raises:
    ValueError: if the name is malformed or the download fails.
    ImportError: if the huggingface_hub package is not installed.
  """
  if repository.count('/') != 1 or not all(repository.split('/')):
    raise ValueError(
      f'hf:{repository} does not name a repository; write hf:organisation/name'
    )
  try:
    import huggingface_hub
  except ImportError as error:
    raise ImportError(
      'hf: names need the huggingface_hub package: pip install '
      'specdec_jax[models]'
    ) from error
  try:
    return Path(
      huggingface_hub.snapshot_download(
        repository, allow_patterns=['*.json', '*.safetensors', '*.jinja']
      )
    )
  except Exception as error:  # Whatever the network stack beneath it raises.
    raise ValueError(
      f'hf:{repository} could not be downloaded ({type(error).__name__}: '
      f'{error}). Without a network, give the path of a folder that holds it'
    ) from error


def _read_json_if_any(path: Path) -> dict[str, Any]:
  return read_json(path) if path.is_file() else {}


def _import_safetensors() -> Any:
  try:
    import safetensors.numpy
  except ImportError as error:
    raise ImportError(
      'Hugging Face folders need the safetensors package: pip install '
      'specdec_jax[models]'
    ) from error
  return safetensors
