"""GGUF files of Llama up to 3.2, Mistral, Qwen2, Qwen3, Gemma 2 and Gemma 3."""

import collections
import itertools
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

from specdec_jax.checkpoints import parameters, stored_arrays
from specdec_jax.checkpoints.gguf import container
from specdec_jax.checkpoints.gguf.container import GgufFile
from specdec_jax.checkpoints.parameters import Parameter
from specdec_jax.files import settings
from specdec_jax.files.settings import Json, Settings
from specdec_jax.models import llama
from specdec_jax.models.gemma.layers import GemmaConfig
from specdec_jax.models.llama import LlamaConfig, RopeScaling
from specdec_jax.models.products import Weights
from specdec_jax.text import ends, vocabularies
from specdec_jax.text.vocabularies import Vocabulary

_Config = LlamaConfig | GemmaConfig
_GEMMAS = ('gemma2', 'gemma3')
# The number of layers of the largest model of each. Only in these models are
# attention scores not divided by the root of a head's size. Files do not state
# it; llama.cpp, too, infers it from the number of layers.
_NUM_LAYERS_27B = {'gemma2': 46, 'gemma3': 62}
_ARCHITECTURES = ('llama', 'qwen2', 'qwen3', *_GEMMAS)
# Llama's and Mistral's architecture: llama.cpp interleaves queries and keys.
_INTERLEAVED = 'llama'
# Keys of an architecture that do not affect the computation.
_WITHOUT_EFFECT = ('vocab_size', 'expert_used_count', 'tensor_data_layout')
_EMBEDDING = 'token_embd.weight'
_ROPE_FACTORS = 'rope_freqs.weight'
# By the names of our branches; those of layer N are below `blk.N`.
_NAMES = {
  'token_embedder': 'token_embd',
  'decoder_norm': 'output_norm',
  'logits_dense': 'output',
  'pre_self_attention_layer_norm': 'attn_norm',
  'self_attention/query': 'attn_q',
  'self_attention/key': 'attn_k',
  'self_attention/value': 'attn_v',
  'self_attention/query_norm': 'attn_q_norm',
  'self_attention/key_norm': 'attn_k_norm',
  'self_attention/out': 'attn_output',
  'pre_mlp_layer_norm': 'ffn_norm',
  'mlp/wi_0': 'ffn_gate',
  'mlp/wi_1': 'ffn_up',
  'mlp/wo': 'ffn_down',
  'post_self_attention_layer_norm': 'post_attention_norm',
  'post_mlp_layer_norm': 'post_ffw_norm',
}
# Values of tokenizer.ggml.token_type.
_CONTROL, _USER_DEFINED = 3, 4
_TOKENS = 'tokenizer.ggml.tokens'
_TYPES = 'tokenizer.ggml.token_type'
_TEMPLATE = 'tokenizer.chat_template'
# llama.cpp's names for the pre-tokenizer of Llama 3.
_LLAMA3_NAMES = ('llama3', 'llama-v3', 'llama-bpe')
# Keys of the EOS tokens; the first is the tokenizer's.
_ENDS = ('eos', 'eot', 'eom', 'fim_pad', 'fim_rep', 'fim_sep')

# Splits words as Llama 3 (with `{1,3}` for the digits) and Qwen2 do:
# contractions, words with one leading sign, digits, signs, line ends, spaces.
_WORDS = (
  r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
  r'|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+'
  r'|\p{{N}}{}'
  r'| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*'
  r'|\s*[\r\n]+'
  r'|\s+(?!\S)'
  r'|\s+'
)


def read_config(path: Path, *, dtype: jnp.dtype = jnp.float32) -> _Config:
  """Returns the config that a GGUF file's metadata and tensors state.

  Raises ValueError if the file is damaged or of another architecture, has
  unknown keys, or needs features that the network lacks (experts, RoPE scaling
  other than Llama 3.1's).
  """
  file = container.open_gguf(path)
  architecture = _architecture(file)
  # `llama.block_count` becomes `block_count`.
  section = f'{architecture}.'
  metadata = {
    key.removeprefix(section): value
    for key, value in file.metadata.items()
    if key.startswith(section)
  }
  values = Settings(path=file.path, values=metadata, section=section)
  num_layers = values.count('block_count', most=settings.MAX_LAYERS)
  if num_layers > len(file.tensors):
    raise ValueError(
      f'{file.path} has {len(file.tensors)} tensors for {num_layers} layers'
    )
  is_gemma = architecture in _GEMMAS
  sizes = sizes_of(values, num_layers, may_lack_head_dim=not is_gemma)
  embedding = file.tensors.get(_EMBEDDING)
  if embedding is None or not embedding.shape[0]:
    raise ValueError(f'{file.path} has no tensor {_EMBEDDING} with rows')
  sizes |= {'vocab_size': embedding.shape[0], 'dtype': dtype}
  config: _Config
  if is_gemma:
    config = gemma_of(values, architecture, sizes)
  else:
    config = _llama_of(file, values, architecture, sizes)
  values.refuse_others(_WITHOUT_EFFECT)
  return config


def sizes_of(
  values: Settings, num_layers: int, *, may_lack_head_dim: bool
) -> Json:
  """Reads the fields that `LlamaConfig` and `GemmaConfig` share."""
  embed_dim = values.count('embedding_length')
  num_heads = values.count('attention.head_count')
  head_dim = values.count(
    'attention.key_length',
    embed_dim // num_heads if may_lack_head_dim else None,
  )
  for key in ('attention.value_length', 'rope.dimension_count'):
    values.expect(key, head_dim, ', the size of a head')
  values.expect('attention.causal', True)
  epsilon = values.positive('attention.layer_norm_rms_epsilon')
  return {
    'embed_dim': embed_dim,
    'num_layers': num_layers,
    'num_heads': num_heads,
    'num_kv_heads': values.count('attention.head_count_kv', num_heads),
    'head_dim': head_dim,
    'mlp_dim': values.count('feed_forward_length'),
    # The shortest decimal of a stored float32: 1e-5, not 9.99...e-6.
    'norm_epsilon': float(str(np.float32(epsilon))),
    'max_positions': values.count('context_length'),
  }


def _llama_of(
  file: GgufFile, values: Settings, architecture: str, sizes: Json
) -> LlamaConfig:
  # Refuse settings with which the network would compute something else.
  values.expect('expert_count', 0, ': experts are not supported')
  values.expect('rope.scaling.type', 'none')
  for key in ('rope.scaling.factor', 'rope.scale_linear'):
    if values.number(key, 1.0) not in (0.0, 1.0):
      values.refuse(key, '1: linear RoPE scaling is not supported')
  rope_base = values.positive('rope.freq_base', 10_000.0)
  window = values.count('attention.sliding_window', 0, least=0)
  return values.build(
    LlamaConfig,
    **sizes,
    rope_base=rope_base,
    rope_scaling=_rope_scaling(file, rope_base, sizes['head_dim']),
    is_tied='output.weight' not in file.tensors,
    has_attention_bias='blk.0.attn_q.bias' in file.tensors,
    has_qk_norm=architecture == 'qwen3',
    windows=(window,) if 0 < window < sizes['max_positions'] else (),
  )


def gemma_of(values: Settings, architecture: str, sizes: Json) -> GemmaConfig:
  """Adds to `sizes` the fields of Gemma 2 or Gemma 3; ValueError for features
  that `models.gemma.decoder` lacks."""
  is_gemma_3 = architecture == 'gemma3'
  base = values.positive('rope.freq_base', 1e6 if is_gemma_3 else 1e4)
  period = 6 if is_gemma_3 else 2
  window = values.count('attention.sliding_window')
  values.expect('attention.sliding_window_pattern', period)
  # Scores are divided by the root of `scalar`, the size of a head but in the
  # largest model.
  scalar = sizes['head_dim']
  if sizes['num_layers'] == _NUM_LAYERS_27B[architecture]:
    scalar = sizes['embed_dim'] // sizes['num_heads']
  # Gemma 3 has norms of queries and keys in place of attention softcapping.
  attention_softcap = 0.0
  local_rope_base = base
  if is_gemma_3:
    local_rope_base = values.positive('rope.freq_base_swa', 1e4)
  else:
    attention_softcap = values.number('attn_logit_softcapping', 50.0)
  return values.build(
    GemmaConfig,
    **sizes,
    query_pre_attn_scalar=scalar,
    windows=(*(window,) * (period - 1), 0),
    attention_softcap=attention_softcap,
    logits_softcap=values.number(
      'final_logit_softcapping', 0.0 if is_gemma_3 else 30.0
    ),
    rope_base=base,
    rope_factor=_rope_factor(values, architecture),
    local_rope_base=local_rope_base,
    has_qk_norm=is_gemma_3,
  )


def _rope_factor(values: Settings, architecture: str) -> float:
  """Reads the factor of linear RoPE scaling, which applies to layers without a
  window."""
  key = 'rope.scaling.type'
  scaling = values.text(key, 'none')
  if scaling == 'none':
    return 1.0
  if scaling != 'linear' or architecture == 'gemma2':
    values.refuse(key, 'none' if architecture == 'gemma2' else 'none or linear')
  return values.positive('rope.scaling.factor')


def _architecture(file: GgufFile) -> str:
  values = Settings(path=file.path, values=file.metadata)
  key = 'general.architecture'
  architecture = values.text(key)
  if architecture not in _ARCHITECTURES:
    values.refuse(key, ' or '.join(_ARCHITECTURES))
  return architecture


def read_params(path: Path, config: _Config) -> Weights:
  """Reads the parameters in a file as our tree, in the config's dtype;
  ValueError if a tensor is unexpected, of an unknown type, or not finite."""
  file = container.open_gguf(path)
  architecture = _architecture(file)
  is_gemma = architecture in _GEMMAS
  family = 'Gemma' if is_gemma else 'Llama'
  if not isinstance(config, GemmaConfig if is_gemma else LlamaConfig):
    raise ValueError(f'{path} holds a {family}, which does not fit {config}')
  # Check names and shapes before anything is dequantised.
  wanted = parameters_of(config)
  tensors = {k: v for k, v in file.tensors.items() if k != _ROPE_FACTORS}
  stored_arrays.check(tensors, {p.name: p.in_file for p in wanted}, file.path)

  def read(parameter: Parameter, name: str) -> np.ndarray:
    values = container.read_tensor(file, name)
    num_heads = num_rotary_heads(config, parameter)
    if num_heads and architecture == _INTERLEAVED:
      return split_rotary_halves(values, num_heads)
    # llama.cpp adds 1 to the scales of Gemma's norms.
    is_scale = parameter.path.endswith('/scale')
    return values - 1 if is_gemma and is_scale else values

  return parameters.read_all(read, wanted, config.dtype)


def parameters_of(config: _Config) -> tuple[Parameter, ...]:
  """Lists every parameter of a model of these sizes, by its name in GGUF."""
  return parameters.named(config, _NAMES, 'blk.{}')


def num_rotary_heads(config: _Config, parameter: Parameter) -> int:
  """Returns the number of heads in a tensor whose rotary halves a Llama's GGUF
  interleaves; 0 for other tensors."""
  heads = {'attn_q': config.num_heads, 'attn_k': config.num_kv_heads}
  return heads.get(parameter.name.split('.')[-2], 0)


def split_rotary_halves(values: np.ndarray, num_heads: int) -> np.ndarray:
  """Undoes the interleaving of llama.cpp's converter, in `[heads * D, ...]`:
  rows 2i and 2i + 1 of a head are a pair before, i and i + D/2 after it."""
  # A head of 4 rows [0, 2, 1, 3] in the file, pairs side by side: [[0, 2], [1,
  # 3]] transposed is [[0, 1], [2, 3]], the first halves and then the second.
  by_pair = values.reshape(num_heads, -1, 2, *values.shape[1:])
  return by_pair.swapaxes(1, 2).reshape(values.shape)


def _rope_scaling(
  file: GgufFile, base: float, head_dim: int
) -> RopeScaling | None:
  """Returns the RoPE scaling; ValueError if it is not Llama 3.1's."""
  # A file has only the divisor of each frequency, which is the full factor for
  # the lowest. The other constants are those of the public models.
  if _ROPE_FACTORS not in file.tensors:
    return None
  divisors = container.read_tensor(file, _ROPE_FACTORS)
  if np.all(divisors == 1.0):
    return None
  factor = float(divisors.max()) if divisors.size else np.nan
  if divisors.shape == (head_dim // 2,) and 1 < factor < np.inf:
    scaling = RopeScaling(factor=factor)
    with np.errstate(all='ignore'):
      expected = llama.rope_divisors(scaling, base=base, head_dim=head_dim)
    if np.allclose(divisors, expected, rtol=1e-4):
      return scaling
  raise ValueError(f'{file.path}: {_ROPE_FACTORS} is not as in Llama 3.1')


def read_vocabulary(path: Path) -> Vocabulary:
  """Returns the byte-level BPE vocabulary of a GGUF file, which tokenizes as
  Hugging Face's tokenizer of the same model. Raises ValueError if there is none
  or it is not BPE, and ImportError without the tokenizers package."""
  file = container.open_gguf(path)
  values = Settings(path=file.path, values=file.metadata)
  if values.text('tokenizer.ggml.model', '') != 'gpt2':
    expected = 'gpt2 (byte-level BPE): pass --vocabulary for others'
    values.refuse('tokenizer.ggml.model', expected)
  tokens = values.texts(_TOKENS)
  if not tokens:
    values.refuse(_TOKENS, 'at least one token')
  # The second id of a repeated token would never be encoded.
  token, count = collections.Counter(tokens).most_common(1)[0]
  if count > 1:
    raise ValueError(f'{file.path}: {_TOKENS} has {token!r} {count} times')
  roles = {
    name: tokens[ids[0]]
    for name in ('bos', 'eos', 'eot')
    if (ids := _token_ids(values, name, len(tokens)))
  }
  tokenizer = _build_tokenizer(values, tokens, roles.get('bos'))
  template = lambda key: values.text(key) if values.has(key) else None
  vocabulary = Vocabulary(
    tokenizer=tokenizer,
    roles={f'{name}_token': token for name, token in roles.items()},
    chat_template=template(_TEMPLATE),
    tool_template=template(f'{_TEMPLATE}.tool_use'),
  )
  return ends.with_ends(vocabulary, _eos_ids(values, len(tokens)), file.path)


def read_eos_ids(path: Path) -> tuple[int, ...]:
  """Returns the EOS ids in the metadata of a GGUF file, whatever its vocabulary
  is."""
  file = container.open_gguf(path)
  return _eos_ids(Settings(path=file.path, values=file.metadata))


def _eos_ids(
  values: Settings, num_tokens: int | None = None
) -> tuple[int, ...]:
  ids_by_name = [_token_ids(values, name, num_tokens) for name in _ENDS]
  return tuple(itertools.chain.from_iterable(ids_by_name))


def _token_ids(
  values: Settings, name: str, num_tokens: int | None = None
) -> list[int]:
  return values.ids(f'tokenizer.ggml.{name}_token_id', num_tokens)


def _build_tokenizer(
  values: Settings, tokens: list[str], bos_token: str | None
) -> Any:
  pre_name = values.text('tokenizer.ggml.pre')
  is_llama3 = pre_name in _LLAMA3_NAMES
  # The default is that of llama.cpp, src/llama-vocab.cpp.
  adds_bos = values.flag('tokenizer.ggml.add_bos_token', is_llama3)
  merges = values.texts('tokenizer.ggml.merges')
  types = _token_types(values, len(tokens))
  pre_tokenizer = _pre_tokenizer(values, pre_name)
  tokenizers = vocabularies.import_tokenizers()
  ids = {token: i for i, token in enumerate(tokens)}
  message = f'{values.path} has an inconsistent tokenizer'
  with vocabularies.package_errors(message):
    tokenizer = tokenizers.Tokenizer(
      tokenizers.models.BPE(
        vocab=ids,
        merges=[tuple(merge.split(' ', 1)) for merge in merges],
        ignore_merges=is_llama3,
      )
    )
    tokenizer.pre_tokenizer = pre_tokenizer
    if pre_name == 'qwen2':
      tokenizer.normalizer = tokenizers.normalizers.NFC()
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    if adds_bos and bos_token:
      tokenizer.post_processor = tokenizers.processors.TemplateProcessing(
        single=f'{bos_token}:0 $A:0',
        special_tokens=[(bos_token, ids[bos_token])],
      )
    added = [
      tokenizers.AddedToken(
        token, normalized=False, special=token_type == _CONTROL
      )
      for token, token_type in zip(tokens, types, strict=False)
      if token_type in (_CONTROL, _USER_DEFINED)
    ]
    # One call, in order of id, since every call takes time.
    tokenizer.add_tokens(added)
  return tokenizer


def _token_types(values: Settings, num_tokens: int) -> list[int]:
  """Returns the type of each token; an empty list if the file lacks them."""
  if not values.has(_TYPES):
    return []
  types = values.values[_TYPES]
  if (
    not isinstance(types, np.ndarray)
    or types.dtype.kind not in 'iu'
    or len(types) != num_tokens
  ):
    values.refuse(_TYPES, f'{num_tokens} numbers, one per token')
  return types.tolist()


def _pre_tokenizer(values: Settings, pre_name: str) -> Any:
  """Returns the pre-tokenizer, which splits text into words before BPE."""
  tokenizers = vocabularies.import_tokenizers()
  pre = tokenizers.pre_tokenizers
  if pre_name == 'smollm':
    digits = pre.Digits(individual_digits=True)
    return pre.Sequence([digits, pre.ByteLevel(False)])
  if pre_name == 'gpt-2':
    return pre.ByteLevel(False)
  if pre_name == 'qwen2' or pre_name in _LLAMA3_NAMES:
    # Splits text into words, and then maps every byte to a character.
    regex = _WORDS.format('' if pre_name == 'qwen2' else '{1,3}')
    words = pre.Split(tokenizers.Regex(regex), 'isolated')
    return pre.Sequence([words, pre.ByteLevel(False, use_regex=False)])
  supported = 'smollm, gpt-2, llama-bpe or qwen2: pass --vocabulary for others'
  values.refuse('tokenizer.ggml.pre', supported)
