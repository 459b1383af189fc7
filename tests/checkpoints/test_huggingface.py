"""Hugging Face folders are read as they were written; bad ones are refused."""

import json

import jax.numpy as jnp
import numpy as np
import pytest

from specdec_jax.checkpoints import huggingface, safetensors_folder
from specdec_jax.checkpoints.huggingface import hub
from specdec_jax.models.llama import RopeScaling
from specdec_jax.text import huggingface_tokenizer
from tests.checkpoints.tiny_models import (
  CHAT_TEMPLATE,
  MERGES,
  assert_trees_equal,
  byte_tokens,
  make_config,
  make_params,
)

pytest.importorskip('safetensors')
tokenizers = pytest.importorskip('tokenizers')


def load_folder(folder, **options) -> tuple:
  """Sizes, parameters and vocabulary of a Hugging Face folder."""
  config = huggingface.read_config(folder, **options)
  vocabulary = huggingface_tokenizer.read_vocabulary(folder)
  return config, huggingface.read_params(folder, config), vocabulary


def tokenizer_json() -> str:
  tokenizer = tokenizers.Tokenizer(
    tokenizers.models.BPE(
      vocab={token: i for i, token in enumerate(byte_tokens())},
      merges=[tuple(merge.split(' ')) for merge in MERGES],
    )
  )
  tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(False)
  tokenizer.decoder = tokenizers.decoders.ByteLevel()
  tokenizer.add_special_tokens(byte_tokens()[:3])
  return tokenizer.to_str()


def save(folder, config, params) -> None:
  huggingface.save(folder, config, params)
  (folder / 'tokenizer.json').write_text(tokenizer_json(), encoding='utf-8')


@pytest.fixture
def folder(tmp_path):
  """A folder with a tiny model."""
  config = make_config()
  save(tmp_path, config, make_params(config))
  return tmp_path


def change_json(path, **changes) -> None:
  settings = json.loads(path.read_text()) if path.exists() else {}
  path.write_text(json.dumps(settings | changes))


def shard(folder) -> None:
  """Splits the weights of a folder over two files."""
  from safetensors.numpy import load_file, save_file

  tensors = load_file(folder / 'model.safetensors')
  (folder / 'model.safetensors').unlink()
  names = sorted(tensors)
  weight_map = {}
  for i, part in enumerate((names[:9], names[9:])):
    file_name = f'model-{i + 1:05}-of-00002.safetensors'
    save_file({name: tensors[name] for name in part}, folder / file_name)
    weight_map |= dict.fromkeys(part, file_name)
  change_json(folder / 'model.safetensors.index.json', weight_map=weight_map)


def rewrite(folder, change) -> None:
  """Applies `change` to the dict of a folder's tensors."""
  from safetensors.numpy import load_file, save_file

  tensors = load_file(folder / 'model.safetensors')
  change(tensors)
  save_file(tensors, folder / 'model.safetensors')


@pytest.mark.parametrize('is_tied', [True, False])
@pytest.mark.parametrize('has_attention_bias', [True, False])
@pytest.mark.parametrize('dtype', [jnp.float32, jnp.bfloat16])
def test_round_trip(tmp_path, is_tied, has_attention_bias, dtype):
  config = make_config(
    is_tied=is_tied, has_attention_bias=has_attention_bias, dtype=dtype
  )
  params = make_params(config)
  save(tmp_path, config, params)
  loaded, loaded_params, vocabulary = load_folder(tmp_path, dtype=dtype)
  assert loaded == config
  assert_trees_equal(loaded_params, params)
  assert vocabulary.tokens() == byte_tokens()


@pytest.mark.parametrize(
  ('changes', 'kind'),
  [
    ({'rope_scaling': RopeScaling(factor=32.0)}, 'llama'),
    ({'windows': (64,)}, 'mistral'),
    ({'windows': (64, 0), 'has_attention_bias': True}, 'qwen2'),
    ({'windows': (0, 64), 'has_qk_norm': True}, 'qwen3'),
    ({'has_qk_norm': True, 'head_dim': 16, 'is_tied': False}, 'qwen3'),
  ],
)
def test_round_trip_of_each_network(tmp_path, changes, kind):
  config = make_config(**changes)
  params = make_params(config)
  save(tmp_path, config, params)
  loaded, loaded_params, _ = load_folder(tmp_path)
  assert loaded == config
  assert_trees_equal(loaded_params, params)
  stated = json.loads((tmp_path / 'config.json').read_text())
  assert stated['model_type'] == kind


@pytest.mark.parametrize(
  ('changes', 'message'),
  [
    (
      {'has_qk_norm': True, 'has_attention_bias': True},
      'has_qk_norm',
    ),
    ({'windows': (64, 0)}, r'mistral.*\[64, 0'),
    (
      {'windows': (64, 32), 'has_qk_norm': True},
      r'qwen3.*\[64, 32',
    ),
  ],
)
def test_networks_that_transformers_has_not_are_not_written(changes, message):
  with pytest.raises(ValueError, match=message):
    huggingface.llama.config_json(make_config(**changes), 'float32')


def test_shards_equal_the_single_file(folder):
  config, params, _ = load_folder(folder)
  shard(folder)
  assert_trees_equal(huggingface.read_params(folder, config), params)


def test_a_tied_head_in_the_file_is_the_embeddings(folder):
  config, params, _ = load_folder(folder)
  rewrite(
    folder,
    lambda t: t.update({
      'lm_head.weight': t['model.embed_tokens.weight'],
      'model.layers.0.self_attn.rotary_emb.inv_freq': np.ones(4, np.float32),
    }),
  )  # fmt: skip
  assert_trees_equal(huggingface.read_params(folder, config), params)
  rewrite(folder, lambda t: t.update({'lm_head.weight': -t['lm_head.weight']}))
  with pytest.raises(
    ValueError, match=r'lm_head\.weight differs from.*"tie_word_embeddings": f'
  ):
    huggingface.read_params(folder, config)


def test_missing_files_are_named(folder):
  config = huggingface.read_config(folder)
  shard(folder)
  (folder / 'model-00002-of-00002.safetensors').unlink()
  with pytest.raises(ValueError, match='lacks model-00002-of-00002'):
    huggingface.read_params(folder, config)
  (folder / 'model.safetensors.index.json').unlink()
  with pytest.raises(ValueError, match='no weights'):
    huggingface.read_params(folder, config)
  (folder / 'tokenizer.json').unlink()
  with pytest.raises(ValueError, match=r'no tokenizer\.json'):
    load_folder(folder)
  (folder / 'config.json').unlink()
  with pytest.raises(ValueError, match=r'cannot read .*config\.json'):
    load_folder(folder)


def test_an_index_that_names_absent_tensors_is_refused(folder):
  config = huggingface.read_config(folder)
  shard(folder)
  path = folder / 'model.safetensors.index.json'
  weight_map = json.loads(path.read_text())['weight_map']
  name = 'model.norm.weight'
  others = set(weight_map.values()) - {weight_map[name]}
  change_json(path, weight_map=weight_map | {name: others.pop()})
  with pytest.raises(ValueError, match=f'lacks .*{name}'):
    huggingface.read_params(folder, config)
  path.write_text('{}')
  with pytest.raises(ValueError, match='no weight_map'):
    huggingface.read_params(folder, config)


@pytest.mark.parametrize(
  ('file_name', 'message'),
  [
    ('../other/model.safetensors', "is '../other/"),
    ('/etc/passwd', r"norm\.weight is '/etc/passwd'"),
    (5, r'weight_map\.model\.norm\.weight is 5'),
    (['a'], r"is \['a'\]"),
    ('a' * 300, 'lacks aaaa'),
    ('\0', 'lacks \0'),
  ],
)
def test_an_index_stays_in_its_folder(folder, file_name, message):
  other = folder.parent / 'other'
  other.mkdir(exist_ok=True)
  (folder / 'model.safetensors').rename(other / 'model.safetensors')
  change_json(
    folder / 'model.safetensors.index.json',
    weight_map={'model.norm.weight': file_name},
  )
  with pytest.raises(ValueError, match=message):
    safetensors_folder.open_tensors(folder)


def test_an_index_without_a_map_is_refused(folder):
  (folder / 'model.safetensors').unlink()
  path = folder / 'model.safetensors.index.json'
  change_json(path, weight_map='all')
  with pytest.raises(ValueError, match="weight_map is 'all'"):
    safetensors_folder.open_tensors(folder)


def test_bad_tensors_are_named(folder):
  config = huggingface.read_config(folder)
  name = 'model.layers.1.mlp.up_proj.weight'

  def refused(change, message):
    original = (folder / 'model.safetensors').read_bytes()
    rewrite(folder, change)
    with pytest.raises(ValueError, match=message):
      huggingface.read_params(folder, config)
    (folder / 'model.safetensors').write_bytes(original)

  refused(lambda t: t.pop(name), f'lacks .*{name}')
  refused(
    lambda t: t.update({name: t[name][1:]}),
    rf'{name} is \[63, 32\]',
  )
  refused(lambda t: t.update({name: t[name].astype(np.int8)}), 'as int8')
  refused(lambda t: t.update({name: t[name] > 0}), f'{name} is stored as BOOL')
  refused(
    lambda t: t.update({key: value[1:] for key, value in t.items()}),
    r'does not fit: .*; .*; .*; .* and \d+ more',
  )
  refused(
    lambda t: t.update({name: t[name] * np.float32(np.nan)}),
    f'{name} holds a NaN',
  )
  refused(
    lambda t: t.update({'model.layers.0.self_attn.q_norm.weight': t[name]}),
    'unexpected .*model.layers.0.self_attn.q_norm',
  )


@pytest.mark.parametrize('size', [0, 5, 100, 5000, -1])
def test_truncated_weights_are_refused(folder, size):
  config = huggingface.read_config(folder)
  path = folder / 'model.safetensors'
  path.write_bytes(path.read_bytes()[:size])
  with pytest.raises(ValueError, match='incomplete'):
    huggingface.read_params(folder, config)


# What stretches rotary positions in Llama 3.1's config.json.
LLAMA3 = {
  'rope_type': 'llama3',
  'factor': 8.0,
  'low_freq_factor': 1.0,
  'high_freq_factor': 4.0,
  'original_max_position_embeddings': 64,
}


@pytest.mark.parametrize(
  ('changes', 'message'),
  [
    (
      {'model_type': 'gpt2'},
      "type is 'gpt2'.*t5, mt5",
    ),
    (
      {'rope_scaling': {'type': 'linear', 'factor': 2.0}},
      r"rope_scaling\.type is 'linear'.*llama3",
    ),
    (
      {'rope_parameters': {'rope_type': 'llama3'}},
      r'rope_parameters\.factor',
    ),
    (
      {'rope_scaling': LLAMA3 | {'factor': 0.5}},
      r'factor 0\.5.* 64',
    ),
    (
      {'rope_scaling': LLAMA3 | {'high_freq_factor': 1.0}},
      'low_freq_factor 1.0.*less than',
    ),
    (
      {'rope_scaling': LLAMA3 | {'beta_fast': 32}},
      r'rope_scaling\.beta_fast is 32',
    ),
    (  # Where there is a rope_scaling, transformers takes nothing from here.
      {'rope_scaling': LLAMA3, 'rope_parameters': {'rope_theta': 1e6}},
      r'rope_parameters\.rope_theta is 1.*no such section beside rope_scaling',
    ),
    (
      {'partial_rotary_factor': 0.5},
      'partial_rotary_factor is 0.5',
    ),
    ({'rope_interleaved': True}, 'rope_interleaved is True'),
    ({'hidden_act': 'gelu'}, "hidden_act is 'gelu'"),
    ({'attention_bias': True}, 'attention_bias is True'),
    ({'mlp_bias': True}, 'mlp_bias is True'),
    (
      {'model_type': 'qwen3', 'attention_bias': True},
      'attention_bias is True',
    ),
    (
      {'quantization_config': {'bits': 4}},
      'quantization_config.*bits',
    ),
    ({'compression_config': {}}, 'compression_config is {}'),
    ({'sliding_window': 64}, 'sliding_window is 64'),
    (
      {'model_type': 'qwen2', 'use_sliding_window': True},
      'no sliding_window.*use_sliding_window',
    ),
    (
      {'layer_types': ['full_attention', 'x']},
      r"layer_types is \['full_attention', 'x'\]",
    ),
    (
      {'model_type': 'qwen2', 'layer_types': ['full_attention'] * 3},
      'expected 2 of full',
    ),
    (
      {
        'model_type': 'mistral',
        'sliding_window': None,
        'layer_types': ['sliding_attention'] * 2,
      },
      'layer_types.*expected 2 of full',
    ),
    ({'logit_scale': 0.5}, 'logit_scale is 0.5'),
    ({'hidden_size': None}, 'no hidden_size'),
    ({'num_attention_heads': 100_000, 'head_dim': None}, 'no head_dim'),
    ({'num_hidden_layers': 900}, 'too few.*900'),
    (
      {'rope_scaling': {'factor': 4.0}},
      r'rope_scaling\.factor is 4.0.*rope_type',
    ),
    ({'is_encoder_decoder': True}, 'is_encoder_decoder is True'),
    ({'is_causal': False}, 'is_causal is False'),
    ({'num_key_value_heads': 3}, '4 heads'),
  ],
)
def test_unsupported_networks_are_refused(folder, changes, message):
  change_json(folder / 'config.json', **changes)
  with pytest.raises(ValueError, match=message):
    load_folder(folder)


@pytest.mark.parametrize(
  ('key', 'value', 'message'),
  [
    ('model_type', 5, 'is 5, expected a string'),
    ('num_hidden_layers', 10**9, 'is 1000000000, .* from 1 to 1000'),
    ('num_attention_heads', 0, 'is 0, expected an integer from 1'),
    ('num_attention_heads', True, 'is True, expected an integer'),
    ('num_key_value_heads', '2', "is '2', expected an integer"),
    ('num_key_value_heads', 0, 'is 0, expected an integer from 1'),
    ('head_dim', 0, 'is 0, expected an integer from 1'),
    ('head_dim', 8.0, 'is 8.0, expected an integer'),
    ('vocab_size', 2**31, 'is 2147483648, expected an integer'),
    ('rms_norm_eps', 'small', "is 'small', expected a number"),
    ('rms_norm_eps', float('nan'), 'is nan, expected a number'),
    ('rms_norm_eps', -1, 'is -1, expected a number above 0'),
    ('rope_theta', 10**400, 'is 1000.*000, expected a number'),
    ('rope_theta', 0, 'is 0, expected a number above 0'),
    ('rope_scaling', 'linear', "is 'linear', expected an object"),
    ('hidden_act', ['silu'], r"is \['silu'\], expected a string"),
    ('mlp_bias', 'no', "is 'no', expected true or false"),
    ('tie_word_embeddings', 'false', "is 'false', expected true or false"),
    ('sliding_window', '64', "is '64', expected an integer"),
    ('layer_types', 5, 'is 5, expected a list of strings'),
    ('layer_types', [None], r'is \[None\], expected a list of strings'),
    ('eos_token_id', 'x' * 500, "is 'x+[.]{3}x+', expected token ids"),
    ('eos_token_id', [2, 2.5], r'is \[2, 2.5\], expected token ids'),
  ],
)
def test_settings_of_another_type_are_named(folder, key, value, message):
  change_json(folder / 'config.json', **{key: value})
  with pytest.raises(ValueError, match=rf'config\.json: {key} {message}'):
    load_folder(folder)


def test_settings_of_a_section_are_named(folder):
  change_json(folder / 'config.json', rope_scaling={'type': 5})
  with pytest.raises(ValueError, match=r'rope_scaling\.type is 5'):
    load_folder(folder)


@pytest.mark.parametrize(
  'changes',
  [
    {'model_type': 'mistral', 'sliding_window': None},
    {'model_type': 'mistral', 'sliding_window': 128},
    {'rope_scaling': {'rope_type': 'default'}, 'rope_interleaved': False},
    {'layer_types': ['full_attention', 'full_attention']},
    {'rope_scaling': {'rope_type': 'default', 'factor': 4.0}},
    {'quantization_config': None, 'head_dim': None, 'is_causal': True},
  ],
)
def test_equal_networks_are_accepted(folder, changes):
  change_json(folder / 'config.json', **changes)
  assert huggingface.read_config(folder) == make_config()


FULL, SLIDING = 'full_attention', 'sliding_attention'


@pytest.mark.parametrize(
  ('changes', 'windows'),
  [
    ({'model_type': 'mistral', 'sliding_window': 64}, (64,)),
    ({'model_type': 'qwen2', 'sliding_window': 64}, ()),
    (
      {
        'model_type': 'qwen2',
        'use_sliding_window': True,
        'sliding_window': 64,
        'max_window_layers': 1,
      },
      (0, 64),
    ),
    (
      {
        'model_type': 'qwen3',
        'use_sliding_window': True,
        'sliding_window': 64,
        'layer_types': [SLIDING, FULL],
      },
      (64, 0),
    ),
    (
      {
        'model_type': 'qwen3',
        'use_sliding_window': True,
        'sliding_window': 64,
      },
      (),
    ),
  ],
)
def test_windows_are_those_of_each_layer(folder, changes, windows):
  change_json(folder / 'config.json', **changes)
  assert huggingface.read_config(folder).windows == windows


def test_a_mistral_has_the_window_of_transformers_by_default(folder):
  """It is not in config.json then."""
  change_json(
    folder / 'config.json', model_type='mistral', max_position_embeddings=8192
  )
  assert huggingface.read_config(folder).windows == (4096,)


@pytest.mark.parametrize(
  'rope',
  [
    {'rope_scaling': LLAMA3},
    {'rope_parameters': {**LLAMA3, 'rope_theta': 5e4}, 'rope_theta': None},
  ],
)
def test_rotary_scaling_of_both_transformers(folder, rope):
  change_json(folder / 'config.json', **rope)
  expected = make_config(
    rope_scaling=RopeScaling(factor=8.0, original_max_positions=64)
  )
  assert huggingface.read_config(folder) == expected


@pytest.mark.parametrize('section', ['rope_parameters', 'rope_scaling'])
def test_a_rotary_base_in_two_places(folder, section):
  def read(base):
    stated = {'rope_type': 'default', 'rope_theta': 1e6}
    change_json(folder / 'config.json', rope_theta=base, **{section: stated})
    return huggingface.read_config(folder)

  assert read(1e6).rope_base == read(None).rope_base == 1e6
  with pytest.raises(
    ValueError,
    match=rf'rope_theta is 50.*1e\+06, the value of {section}\.rope_theta',
  ):
    read(50.0)


def test_rotary_base_of_transformers_5(folder):
  change_json(
    folder / 'config.json',
    rope_theta=None,
    rope_parameters={'rope_theta': 1e6, 'rope_type': 'default'},
  )
  assert huggingface.read_config(folder).rope_base == 1e6


@pytest.mark.parametrize('text', ['', '{', '[]', '[' * 100_000, b'\xff'])
def test_broken_json_is_refused(folder, text):
  content = text if isinstance(text, bytes) else text.encode()
  (folder / 'config.json').write_bytes(content)
  with pytest.raises(ValueError, match=r'config\.json.*no JSON'):
    load_folder(folder)


def test_a_broken_tokenizer_is_refused(folder):
  (folder / 'tokenizer.json').write_text('{}')
  with pytest.raises(ValueError, match=r'tokenizer\.json cannot'):
    huggingface_tokenizer.read_vocabulary(folder)


def test_truncation_and_padding_are_off(folder):
  """A tokenizer that was saved after training still has both on."""
  text = 'the in 12 ' * 30
  whole = huggingface_tokenizer.read_vocabulary(folder).encode(text)
  tokenizer = tokenizers.Tokenizer.from_file(str(folder / 'tokenizer.json'))
  tokenizer.enable_truncation(8)
  tokenizer.enable_padding(length=16, pad_id=0, pad_token='<|endoftext|>')
  tokenizer.save(str(folder / 'tokenizer.json'))
  vocabulary = huggingface_tokenizer.read_vocabulary(folder)
  assert len(whole) > 100
  assert vocabulary.encode(text) == whole
  assert len(vocabulary.encode('in')) == 1


@pytest.mark.parametrize(
  ('changes', 'message'),
  [
    ({'eos_token': 5}, 'eos_token is 5, expected a string'),
    ({'eos_token': {'content': 5}}, r'eos_token\.content is 5, expected'),
    ({'chat_template': 5}, 'chat_template is 5, expected a string'),
    ({'chat_template': [5]}, 'chat_template is .5., expected'),
    ({'chat_template': [{'name': 5}]}, r'chat_template\.name is 5, expected'),
  ],
)
def test_tokenizer_settings_of_another_type(folder, changes, message):
  change_json(folder / 'tokenizer_config.json', **changes)
  with pytest.raises(ValueError, match=rf'tokenizer_config\.json: {message}'):
    huggingface_tokenizer.read_vocabulary(folder)


def test_where_the_chat_template_comes_from(folder):
  read = lambda: huggingface_tokenizer.read_vocabulary(folder).chat_template
  assert read() is None
  settings = folder / 'tokenizer_config.json'
  change_json(settings, chat_template='single', bos_token='<|im_start|>')
  assert read() == 'single'
  change_json(
    settings,
    chat_template=[
      {'name': 'tool_use', 'template': 'tools'},
      {'name': 'default', 'template': CHAT_TEMPLATE},
    ],
  )
  vocabulary = huggingface_tokenizer.read_vocabulary(folder)
  assert vocabulary.chat_template == CHAT_TEMPLATE
  assert vocabulary.roles['bos_token'] == '<|im_start|>'
  assert vocabulary.tool_template == 'tools'
  (folder / 'chat_template.jinja').write_text('file')
  assert read() == 'file'
  # As transformers saves several.
  more = folder / 'additional_chat_templates'
  more.mkdir()
  (more / 'tool_use.jinja').write_text('tools of a file')
  vocabulary = huggingface_tokenizer.read_vocabulary(folder)
  assert vocabulary.chat_template == 'file'
  assert vocabulary.tool_template == 'tools of a file'


def test_saving_names_what_is_wrong(tmp_path):
  config = make_config()
  params = make_params(config)
  params['decoder_norm']['scale'] = jnp.ones(3)
  with pytest.raises(ValueError, match=r'decoder_norm/scale is \[3\]'):
    huggingface.save(tmp_path, config, params)
  del params['decoder_norm']
  with pytest.raises(ValueError, match='no decoder_norm/scale'):
    huggingface.save(tmp_path, config, params)
  assert list(tmp_path.iterdir()) == []


def test_downloads(monkeypatch, tmp_path):
  huggingface_hub = pytest.importorskip('huggingface_hub')

  def snapshot(name, *, allow_patterns, ignore_patterns, **_):
    files = ['model-1-of-2.safetensors', 'consolidated.safetensors']
    patterns = {'allow_patterns': allow_patterns}
    patterns |= {'ignore_patterns': ignore_patterns}
    assert [
      *huggingface_hub.utils.filter_repo_objects(files, **patterns)
    ] == files[:1]
    return str(tmp_path / name)

  monkeypatch.setattr(huggingface_hub, 'snapshot_download', snapshot)
  assert hub.download('some/model') == tmp_path / 'some/model'

  def fail(name, **_):
    raise OSError('no route to host')

  monkeypatch.setattr(huggingface_hub, 'snapshot_download', fail)
  with pytest.raises(ValueError, match=r'hf:some/model.*no route'):
    hub.download('some/model')
  for name in ('model', '/model', 'a/b/c', ''):
    with pytest.raises(ValueError, match='write hf:organisation/name'):
      hub.download(name)
