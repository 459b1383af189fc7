"""GGUF files are read as they were written, and bad ones are refused."""

import contextlib
import struct

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specdec_jax.checkpoints import gguf
from specdec_jax.checkpoints.gguf import container
from specdec_jax.models import llama
from specdec_jax.models.llama import RopeScaling
from tests.checkpoints.tiny_models import (
  CHAT_TEMPLATE,
  MERGES,
  assert_trees_equal,
  byte_tokens,
  interleave_rotary_halves,
  load,
  make_config,
  make_params,
  write_gguf,
)

gguf_package = pytest.importorskip('gguf')
pytest.importorskip('tokenizers')


@pytest.mark.parametrize('is_tied', [True, False])
@pytest.mark.parametrize('has_attention_bias', [True, False])
@pytest.mark.parametrize('dtype', [jnp.float32, jnp.bfloat16])
def test_round_trip(tmp_path, is_tied, has_attention_bias, dtype):
  config = make_config(
    is_tied=is_tied, has_attention_bias=has_attention_bias, dtype=dtype
  )
  params = make_params(config)
  tools = {'tokenizer.chat_template.tool_use': 'tools'} if is_tied else {}
  write_gguf(tmp_path / 'tiny.gguf', config, params, metadata=tools)
  loaded, loaded_params, vocabulary = load(
    gguf, tmp_path / 'tiny.gguf', dtype=dtype
  )
  assert loaded == config
  assert_trees_equal(loaded_params, params)
  assert vocabulary.vocab_size == config.vocab_size
  assert vocabulary.eos_ids == (2, 0)
  assert vocabulary.roles['bos_token'] == '<|im_start|>'
  assert vocabulary.chat_template == CHAT_TEMPLATE
  assert vocabulary.tool_template == ('tools' if is_tied else None)


@pytest.mark.parametrize(
  ('architecture', 'changes', 'stated'),
  [
    ('llama', {'rope_scaling': RopeScaling(factor=32.0)}, {}),
    ('llama', {'windows': (64,)}, {'attention.sliding_window': 64}),
    ('llama', {}, {'attention.sliding_window': 128, 'vocab_size': 265}),
    ('qwen2', {'has_attention_bias': True}, {}),
    (
      'qwen3',
      {'has_qk_norm': True, 'head_dim': 16},
      {'attention.key_length': 16, 'attention.value_length': 16},
    ),
  ],
)
def test_round_trip_of_each_network(tmp_path, architecture, changes, stated):
  config, extra = make_config(**changes), {}
  if config.rope_scaling is not None:
    extra['rope_freqs.weight'] = llama.rope_divisors(
      config.rope_scaling, base=config.rope_base, head_dim=config.head_dim
    )
  params = make_params(config)
  path = tmp_path / 'tiny.gguf'
  metadata = {f'{architecture}.{key}': value for key, value in stated.items()}
  write_gguf(
    path,
    config,
    params,
    architecture=architecture,
    metadata=metadata,
    extra=extra,
  )
  loaded, loaded_params, _ = load(gguf, path)
  assert loaded == config
  assert_trees_equal(loaded_params, params)


@pytest.mark.parametrize(
  'quantization', ['F16', 'BF16', 'Q8_0', 'Q4_0', 'Q4_1']
)
def test_quantised_tensors_equal_the_packages_own(tmp_path, quantization):
  config = make_config(vocab_size=300)
  params = make_params(config)
  path = tmp_path / 'tiny.gguf'
  write_gguf(path, config, params, quantization=quantization)
  file = container.open_gguf(path)
  for tensor in gguf_package.GGUFReader(path).tensors:
    expected = gguf_package.dequantize(tensor.data, tensor.tensor_type)
    np.testing.assert_array_equal(
      container.read_tensor(file, tensor.name), expected, tensor.name
    )
  embedding = gguf.read_params(path, config)['token_embedder']['embedding']
  error = np.abs(embedding - params['token_embedder']['embedding']).max()
  assert 0 < error < 0.5


def test_tensors_of_many_chunks(tmp_path, monkeypatch):
  config = make_config()
  write_gguf(tmp_path / 'tiny.gguf', config, make_params(config))
  file = container.open_gguf(tmp_path / 'tiny.gguf')
  whole = container.read_tensor(file, 'token_embd.weight')
  monkeypatch.setattr(container, '_BLOCKS_AT_A_TIME', 7)
  np.testing.assert_array_equal(
    container.read_tensor(file, 'token_embd.weight'), whole
  )


def test_rotary_halves():
  rows = np.array([0, 10, 1, 11, 2, 12, 100, 110, 101, 111, 102, 112])
  halves = np.array([0, 1, 2, 10, 11, 12, 100, 101, 102, 110, 111, 112])
  np.testing.assert_array_equal(gguf.split_rotary_halves(rows, 2), halves)
  np.testing.assert_array_equal(interleave_rotary_halves(halves, 2), rows)


def test_params_are_in_memory_of_their_own(tmp_path):
  config = make_config()
  path = tmp_path / 'tiny.gguf'
  write_gguf(path, config, make_params(config))
  _, params, _ = load(gguf, path)
  before = jax.tree.map(lambda leaf: np.array(leaf), params)
  with open(path, 'r+b') as file:
    file.write(bytes(path.stat().st_size))
  assert_trees_equal(params, before)


def test_every_truncation_is_refused(tmp_path):
  config = make_config()
  path, cut = tmp_path / 'tiny.gguf', tmp_path / 'cut.gguf'
  write_gguf(path, config, make_params(config))
  content = path.read_bytes()
  sizes = np.linspace(4, len(content) - 40, 60).astype(int)
  for size in [*range(4, 40), *sizes]:
    cut.write_bytes(content[:size])
    with pytest.raises(ValueError, match=r'cut\.gguf is truncated'):
      load(gguf, cut)


def _header(*, num_tensors=0, num_metadata=0) -> bytes:
  """What is before the metadata in a file of version 3."""
  return b'GGUF' + struct.pack('<IQQ', 3, num_tensors, num_metadata)


A_IS_7 = struct.pack('<Q', 1) + b'a' + struct.pack('<II', 4, 7)
A_IS_AN_ARRAY = struct.pack('<Q', 1) + b'a' + struct.pack('<I', 9)
OF_ONE_ARRAY = struct.pack('<IQ', 9, 1)
WITHOUT_AXES = struct.pack('<Q', 1) + b't' + struct.pack('<IIQ', 0, 0, 0)
BAD_HEADERS = {
  'empty': (b'', 'not a GGUF'),
  '2 bytes': (b'GG', 'not a GGUF'),
  'ZIP': (b'PK\x03\x04' + bytes(99), 'not a GGUF'),
  'version 1': (b'GGUF\1\0\0\0' + bytes(99), 'of version 1 '),
  'version 4': (b'GGUF\4\0\0\0' + bytes(99), 'of version 4 '),
  'big-endian': (b'GGUF\0\0\0\3' + bytes(99), f'of version {3 << 24} '),
  'array of arrays': (
    _header(num_metadata=1) + A_IS_AN_ARRAY + OF_ONE_ARRAY * 3000,
    'array of arrays',
  ),
  'metadata twice': (
    _header(num_metadata=2) + A_IS_7 * 2,
    r'odd\.gguf.*metadata a .*twice',
  ),
  'tensor without axes': (
    _header(num_tensors=1) + WITHOUT_AXES,
    r'odd\.gguf.*tensor t .*0 axes',
  ),
}


@pytest.mark.parametrize(
  ('content', 'message'), BAD_HEADERS.values(), ids=BAD_HEADERS
)
def test_bad_headers_are_refused(tmp_path, content, message):
  path = tmp_path / 'odd.gguf'
  path.write_bytes(content)
  with pytest.raises(ValueError, match=message):
    load(gguf, path)


def test_noise_in_the_header_never_escapes_as_another_error(tmp_path):
  config = make_config()
  path, noisy = tmp_path / 'tiny.gguf', tmp_path / 'noisy.gguf'
  write_gguf(path, config, make_params(config))
  content = np.frombuffer(path.read_bytes(), np.uint8)
  rng = np.random.default_rng(0)
  for _ in range(200):
    changed = content.copy()
    where = rng.integers(4, 1200, size=3)
    changed[where] = rng.integers(0, 256, size=3, dtype=np.uint8)
    changed.tofile(noisy)
    with contextlib.suppress(ValueError):
      load(gguf, noisy)


TOKENS = byte_tokens()
SHORT_TOKENS = ['q2', 'q3', 'q4', *TOKENS[3:]]
SHORT_TOKENS[len(TOKENS) - len(MERGES) + 2] = 'q1'


@pytest.mark.parametrize(
  ('metadata', 'message'),
  [
    ({'general.architecture': 'gpt2'}, "general.architecture is 'gpt2'.*qwen2"),
    ({'llama.block_count': None}, 'no llama.block_count'),
    ({'llama.attention.head_count_kv': [2, 1]}, r'head_count_kv is \[2, 1\]'),
    ({'llama.expert_count': 8}, 'llama.expert_count is 8'),
    ({'llama.rope.scaling.type': 'yarn'}, "llama.rope.scaling.type is 'yarn'"),
    ({'llama.rope.scaling.factor': 4.0}, 'llama.rope.scaling.factor is 4.0'),
    ({'llama.rope.dimension_count': 4}, 'llama.rope.dimension_count is 4'),
    ({'llama.attention.key_length': 16}, 'dimension_count is 8'),
    ({'llama.attention.value_length': 16}, 'value_length is 16'),
    ({'llama.attention.causal': False}, 'causal.*False'),
    ({'llama.rope.freq_base': -5.0}, 'freq_base is -5.0.*above 0'),
    ({'llama.logit_scale': 0.5}, 'llama.logit_scale is 0.5'),
    ({'llama.block_count': 10**9}, 'is 1000000000'),
    ({'llama.block_count': 900}, 'tensors for 900'),
    ({'llama.attention.head_count': 0}, 'head_count is 0'),
    ({'llama.attention.head_count': 3}, 'dimension_count is 8'),
    ({'llama.feed_forward_length': 48}, r'ffn_gate.weight is \[64, 32\]'),
    ({'llama.block_count': 3}, 'lacks .*blk.2'),
    ({'llama.block_count': 1}, 'unexpected.*blk.1'),
    ({'tokenizer.ggml.model': 'llama'}, "model is 'llama'.*--voc"),
    ({'tokenizer.ggml.model': None}, 'no tokenizer.ggml.model.*--voc'),
    (
      {'tokenizer.ggml.model': None, 'tokenizer.ggml.tokens': None},
      'no tokenizer.ggml.model.*--voc',
    ),
    ({'tokenizer.ggml.pre': 'tekken'}, "pre is 'tekken'.*--voc"),
    ({'tokenizer.ggml.tokens': ['a']}, 'bos_token_id is 1.*to 0'),
    ({'tokenizer.ggml.merges': ['q zz']}, 'inconsistent tokenizer'),
    ({'tokenizer.ggml.merges': ['nospace']}, 'inconsistent tokenizer'),
    ({'tokenizer.ggml.eos_token_id': 5000}, 'eos_token_id is 5000.*to 264'),
    (
      {'tokenizer.ggml.tokens': [*TOKENS[:40], TOKENS[41], *TOKENS[41:]]},
      rf'tokens has {TOKENS[41]!r} 2 times',
    ),
    # The tokenizers package panics at a merge longer than all tokens.
    ({'tokenizer.ggml.tokens': SHORT_TOKENS}, 'inconsistent tok'),
  ],
)
def test_unsupported_models_are_refused(tmp_path, metadata, message):
  config = make_config()
  path = tmp_path / 'tiny.gguf'
  write_gguf(path, config, make_params(config), metadata=metadata)
  with pytest.raises(ValueError, match=message):
    load(gguf, path)


@pytest.mark.parametrize(
  ('key', 'value', 'message'),
  [
    ('llama.attention.head_count', 4.0, 'is 4.0, expected an integer'),
    ('llama.attention.head_count_kv', 0, 'is 0, expected an integer from 1'),
    ('llama.attention.head_count_kv', '2', "is '2', expected an integer"),
    ('llama.attention.sliding_window', '64', "is '64', expected an integer"),
    ('llama.rope.freq_base', 'high', "is 'high', expected a number"),
    ('llama.rope.freq_base', float('nan'), 'is nan, expected a number'),
    ('llama.rope.scaling.type', [1], r'is \[1\], expected a string'),
    ('tokenizer.ggml.tokens', 'a', "is 'a', expected a list of strings"),
    ('tokenizer.ggml.tokens', [1, 2], r'is \[1, 2\], expected a list of'),
    ('tokenizer.ggml.merges', 7, 'is 7, expected a list of strings'),
    ('tokenizer.ggml.token_type', 3, 'is 3, expected 265 numbers'),
    ('tokenizer.ggml.bos_token_id', 1.0, 'is 1.0, expected token ids from 0'),
    ('tokenizer.ggml.eos_token_id', '2', "is '2', expected token ids from 0"),
    ('tokenizer.ggml.add_bos_token', 1, 'is 1, expected true or false'),
    ('tokenizer.chat_template', 1, 'is 1, expected a string'),
    ('tokenizer.chat_template.tool_use', 1, 'is 1, expected a string'),
  ],
)
def test_metadata_of_another_type_is_named(tmp_path, key, value, message):
  path = tmp_path / 'tiny.gguf'
  config = make_config()
  write_gguf(path, config, make_params(config), metadata={key: value})
  with pytest.raises(ValueError, match=rf'tiny\.gguf: {key} {message}'):
    load(gguf, path)


def test_arrays_of_numbers_stay_in_the_file(tmp_path):
  """As Python's integers they take up to 36 times the memory."""
  path = tmp_path / 'array.gguf'
  header = b'GGUF' + struct.pack('<IQQ', 3, 0, 1)
  key = struct.pack('<Q', 1) + b'a' + struct.pack('<IIQ', 9, 1, 2000)
  path.write_bytes(header + key + b'\x80' * 2000)
  values = container.open_gguf(path).metadata['a']
  assert isinstance(values, np.ndarray)
  assert values.dtype == np.int8
  assert set(values.tolist()) == {-128}


def _extra(name: str, *values: float) -> dict:
  """A tensor of some numbers, written after the others."""
  return {'extra': {name: np.array(values, np.float32)}}


@pytest.mark.parametrize(
  ('changes', 'message'),
  [
    ({'omit': ('token_embd.weight',)}, '(no|lacks) .*token_embd.weight'),
    (
      {'omit': ('blk.1.ffn_down.weight',)},
      '(no|lacks) .*blk.1.ffn_down.weight',
    ),
    ({'omit': ('output_norm.weight',)}, '(no|lacks) .*output_norm.weight'),
    (_extra('blk.0.attn_q_norm.weight', *[1] * 8), r'attn_q_norm\.weight'),
    (_extra('rope_freqs.weight', 1, 1, 2, 8), r'rope_freqs\.weight'),
  ],
)
def test_unfitting_tensors_are_named(tmp_path, changes, message):
  config = make_config()
  path = tmp_path / 'tiny.gguf'
  write_gguf(path, config, make_params(config), **changes)
  with pytest.raises(ValueError, match=message):
    load(gguf, path)


def test_rotary_frequencies_as_usual_are_accepted(tmp_path):
  config = make_config()
  path = tmp_path / 'tiny.gguf'
  ones = _extra('rope_freqs.weight', *[1] * 4)
  write_gguf(path, config, make_params(config), **ones)
  load(gguf, path)


def test_an_embedding_without_rows_is_refused(tmp_path):
  config = make_config()
  path = tmp_path / 'tiny.gguf'
  write_gguf(path, config, make_params(config))
  # The name is followed by the number of axes, 32 bits, and by their sizes, 64
  # bits each, of which the number of rows is the last.
  name, content = b'token_embd.weight', bytearray(path.read_bytes())
  at = content.index(name) + len(name) + 4 + 8
  assert struct.unpack_from('<Q', content, at) == (config.vocab_size,)
  struct.pack_into('<Q', content, at, 0)
  path.write_bytes(content)
  with pytest.raises(ValueError, match=r'token_embd\.weight'):
    gguf.read_params(path, gguf.read_config(path))


@pytest.mark.parametrize('bad', [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize('quantization', ['F32', 'Q8_0'])
@pytest.mark.filterwarnings('ignore:invalid value:RuntimeWarning')
def test_weights_that_are_not_finite_are_named(tmp_path, bad, quantization):
  config = make_config()
  params = make_params(config)
  kernel = params['layers_1']['mlp']['wo']['kernel']
  params['layers_1']['mlp']['wo']['kernel'] = kernel.at[3, 5].set(bad)
  path = tmp_path / 'tiny.gguf'
  write_gguf(path, config, params, quantization=quantization)
  with pytest.raises(ValueError, match=r'blk\.1\.ffn_down\.weight.*NaN'):
    load(gguf, path)


def test_large_finite_weights_are_accepted(tmp_path):
  config = make_config()
  params = make_params(config)
  scale = jnp.full((config.embed_dim,), 3e38)
  params['decoder_norm']['scale'] = scale
  write_gguf(tmp_path / 'tiny.gguf', config, params)
  _, loaded, _ = load(gguf, tmp_path / 'tiny.gguf')
  np.testing.assert_array_equal(loaded['decoder_norm']['scale'], scale)


@pytest.mark.parametrize(
  ('splitting', 'text', 'expected'),
  [
    ('smollm', ' the  12', ['Ġthe', 'ĠĠ', '1', '2']),
    ('gpt-2', ' the  12', ['Ġthe', 'Ġ', 'Ġ', '12']),
    ('llama-bpe', ' the  12', ['Ġthe', 'Ġ', 'Ġ', '12']),
    ('llama-bpe', "I'LL IN in", None),
    ('qwen2', ' the  12', ['Ġthe', 'Ġ', 'Ġ', '1', '2']),
  ],
)
def test_words_are_split_as_the_file_says(tmp_path, splitting, text, expected):
  config = make_config()
  path = tmp_path / 'tiny.gguf'
  write_gguf(
    path,
    config,
    make_params(config),
    metadata={'tokenizer.ggml.pre': splitting},
  )
  _, _, vocabulary = load(gguf, path)
  ids = vocabulary.encode(text, add_special_tokens=False)
  assert vocabulary.decode(ids) == text
  if expected is not None:
    assert [vocabulary.tokens()[i] for i in ids] == expected


def test_a_begin_token_is_added_where_the_file_says(tmp_path):
  config = make_config()
  path = tmp_path / 'tiny.gguf'
  write_gguf(
    path,
    config,
    make_params(config),
    metadata={'tokenizer.ggml.add_bos_token': True},
  )
  _, _, vocabulary = load(gguf, path)
  ids = vocabulary.encode('in')
  assert ids[0] == 1
  assert vocabulary.encode('in', add_special_tokens=False) == ids[1:]
  assert vocabulary.decode(ids) == 'in'
  assert vocabulary.encode_chat('in').count(1) == 2


@pytest.mark.parametrize('splitting', ['llama3', 'llama-v3', 'llama-bpe'])
def test_a_llama_3_begins_with_its_begin_token_by_default(tmp_path, splitting):
  config = make_config()
  path = tmp_path / 'tiny.gguf'

  def encode(**metadata):
    metadata = {f'tokenizer.ggml.{k}': v for k, v in metadata.items()}
    write_gguf(path, config, make_params(config), metadata=metadata)
    return load(gguf, path)[2].encode('in')

  ids = encode(pre=splitting)
  assert ids[0] == 1
  assert encode(pre=splitting, add_bos_token=False) == ids[1:]
  assert encode(pre='gpt-2') == ids[1:]
