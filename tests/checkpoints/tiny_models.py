"""Tiny models and the files that hold them."""

import dataclasses

import jax
import numpy as np
import pytest

from specdec_jax.checkpoints import gguf as gguf_files
from specdec_jax.checkpoints import stored_arrays
from specdec_jax.models import families
from specdec_jax.models.gemma.layers import GemmaConfig
from specdec_jax.models.llama import LlamaConfig

# As GPT-2 writes bytes; the merges build 'Ġthe', 'in', two spaces and '12'.
SPECIAL_TOKENS = ['<|endoftext|>', '<|im_start|>', '<|im_end|>']
MERGES = ['Ġ t', 'h e', 'Ġt he', 'i n', 'Ġ Ġ', '1 2']
CHAT_TEMPLATE = (
  "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' + "
  "message['content'] + '<|im_end|>' + '\\n' }}{% endfor %}"
  "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


def byte_tokens() -> list[str]:
  """The tokens of the tiny vocabulary: specials, bytes, merged pairs."""
  tokenizers = pytest.importorskip('tokenizers')
  alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
  return SPECIAL_TOKENS + alphabet + [m.replace(' ', '') for m in MERGES]


def make_config(**changes) -> LlamaConfig:
  config = LlamaConfig(
    vocab_size=len(byte_tokens()),
    embed_dim=32,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    mlp_dim=64,
    rope_base=50_000.0,
    norm_epsilon=1e-5,
    max_positions=128,
    is_tied=True,
  )
  return dataclasses.replace(config, **changes)


def make_params(config: LlamaConfig, seed: int = 0) -> dict:
  rng = np.random.default_rng(seed)
  return jax.tree.map(
    lambda leaf: jax.numpy.asarray(rng.standard_normal(leaf.shape), leaf.dtype),
    families.param_shapes(config),
  )


def load(package, path, **options) -> tuple:
  """Sizes, parameters and vocabulary, by a package of `checkpoints`."""
  config = package.read_config(path, **options)
  vocabulary = package.read_vocabulary(path)
  return config, package.read_params(path, config), vocabulary


def interleave_rotary_halves(values, num_heads: int):
  """What llama.cpp's converter does to the rows of queries and keys."""
  by_half = values.reshape(num_heads, 2, -1, *values.shape[1:])
  return by_half.swapaxes(1, 2).reshape(values.shape)


def assert_trees_equal(tree, expected) -> None:
  """Same structure, shapes, dtypes and bits."""
  assert jax.tree.structure(tree) == jax.tree.structure(expected)

  def check(path, leaf, other):
    name = jax.tree_util.keystr(path)
    assert leaf.dtype == other.dtype, name
    np.testing.assert_array_equal(np.asarray(leaf), np.asarray(other), name)

  jax.tree_util.tree_map_with_path(check, tree, expected)


def write_gguf(
  path,
  config: LlamaConfig | GemmaConfig,
  params: dict,
  *,
  architecture: str = 'llama',
  quantization: str = 'F32',
  metadata: dict | None = None,
  omit: tuple[str, ...] = (),
  extra: dict | None = None,
  **splitting,
) -> None:
  """Writes a GGUF file as llama.cpp's converter does.

  Args:
    path: of the file.
    config: sizes.
    params: the tree of `models.llama.Llama`.
    architecture: of the network; a Llama's queries and keys are interleaved,
      and a Gemma's norms are 1 larger.
    quantization: of the matrices.
    metadata: keys to set after the usual ones; None leaves one out.
    omit: tensors to leave out.
    extra: float32 tensors by name to write after the others.
    splitting: how `gguf.GGUFWriter` splits the model into several files.
  """
  gguf = pytest.importorskip('gguf')
  kind = gguf.GGMLQuantizationType[quantization]
  values = _metadata(config, architecture) | (metadata or {})
  architecture = values.pop('general.architecture')
  writer = gguf.GGUFWriter(path, architecture, **splitting)
  for key, value in values.items():
    _add(writer, key, value)
  leaves, tensors = stored_arrays.flatten(params), {}
  for parameter in gguf_files.parameters_of(config):
    tensor = np.asarray(leaves[parameter.path], np.float32)
    tensor = tensor.T if parameter.is_transposed else tensor
    num_heads = gguf_files.num_rotary_heads(config, parameter)
    if num_heads and architecture == 'llama':
      tensor = interleave_rotary_halves(tensor, num_heads)
    if architecture.startswith('gemma') and parameter.path.endswith('scale'):
      tensor = tensor + 1
    tensors[parameter.name] = np.ascontiguousarray(tensor)
  for name in omit:
    tensors.pop(name, None)
  for name, tensor in (tensors | (extra or {})).items():
    if tensor.ndim == 1 or quantization == 'F32':
      writer.add_tensor(name, tensor)
    else:
      writer.add_tensor(
        name, gguf.quants.quantize(tensor, kind), raw_dtype=kind
      )
  writer.write_header_to_file()
  writer.write_kv_data_to_file()
  writer.write_tensors_to_file()
  writer.close()


def _metadata(config: LlamaConfig | GemmaConfig, architecture: str) -> dict:
  tokens = byte_tokens()
  return {
    'general.architecture': architecture,
    f'{architecture}.block_count': config.num_layers,
    f'{architecture}.context_length': config.max_positions,
    f'{architecture}.embedding_length': config.embed_dim,
    f'{architecture}.feed_forward_length': config.mlp_dim,
    f'{architecture}.attention.head_count': config.num_heads,
    f'{architecture}.attention.head_count_kv': config.num_kv_heads,
    f'{architecture}.rope.freq_base': config.rope_base,
    f'{architecture}.rope.dimension_count': config.head_dim,
    f'{architecture}.attention.layer_norm_rms_epsilon': config.norm_epsilon,
    'tokenizer.ggml.model': 'gpt2',
    'tokenizer.ggml.pre': 'smollm',
    'tokenizer.ggml.tokens': tokens,
    'tokenizer.ggml.token_type': [3] * len(SPECIAL_TOKENS)
    + [1] * (len(tokens) - len(SPECIAL_TOKENS)),
    'tokenizer.ggml.merges': MERGES,
    'tokenizer.ggml.bos_token_id': 1,
    'tokenizer.ggml.eos_token_id': 2,
    'tokenizer.chat_template': CHAT_TEMPLATE,
  }


def _add(writer, key: str, value) -> None:
  match value:
    case None:
      pass
    case int() if key == 'general.alignment':
      writer.add_custom_alignment(value)
    case bool():
      writer.add_bool(key, value)
    case int():
      writer.add_uint32(key, value)
    case float():
      writer.add_float32(key, value)
    case str():
      writer.add_string(key, value)
    case list():
      writer.add_array(key, value)
