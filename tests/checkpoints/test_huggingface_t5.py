"""T5s in Hugging Face folders are read as written; bad ones are refused."""

import io
import json

import jax.numpy as jnp
import numpy as np
import pytest

from specdec_jax.checkpoints import huggingface, loading
from specdec_jax.cli.main import main
from specdec_jax.text import prompts, vocabulary_files
from tests.checkpoints.huggingface_folders import rewrite
from tests.checkpoints.tiny_models import assert_trees_equal
from tests.checkpoints.tiny_t5 import make_config, make_params

pytest.importorskip('safetensors')

ABSENT = 'absent'


def change_json(path, **changes) -> None:
  settings = json.loads(path.read_text()) | changes
  settings = {k: v for k, v in settings.items() if v != ABSENT}
  path.write_text(json.dumps(settings))


@pytest.fixture
def folder(tmp_path):
  """A folder with a tiny T5 1.1."""
  config = make_config()
  huggingface.save(tmp_path, config, make_params(config))
  return tmp_path


@pytest.mark.parametrize('is_tied', [True, False])
@pytest.mark.parametrize('activations', [('relu',), ('gelu', 'linear')])
@pytest.mark.parametrize('dtype', [jnp.float32, jnp.bfloat16])
def test_round_trip(tmp_path, is_tied, activations, dtype):
  config = make_config(
    is_tied=is_tied, mlp_activations=activations, dtype=dtype
  )
  params = make_params(config)
  huggingface.save(tmp_path, config, params)
  assert huggingface.read_config(tmp_path, dtype=dtype) == config
  assert_trees_equal(huggingface.read_params(tmp_path, config), params)


def test_a_umt5_is_written_and_read(tmp_path):
  """Its layers have relative positions of their own."""
  config = make_config(has_layer_relpos=True)
  params = make_params(config)
  ends = tmp_path / 'generation_config.json'
  ends.write_text('{"eos_token_id": [1]}')
  huggingface.save(tmp_path, config, params)
  ids = {'decoder_start_token_id': 0, 'pad_token_id': 0, 'eos_token_id': [1]}
  assert json.loads(ends.read_text()) == ids
  stated = json.loads((tmp_path / 'config.json').read_text())
  assert stated['model_type'] == 'umt5'
  assert huggingface.read_config(tmp_path) == config
  assert_trees_equal(huggingface.read_params(tmp_path, config), params)


def test_every_tensor_is_transposed_but_embeddings(folder):
  from safetensors.numpy import load_file

  config = make_config()
  params = make_params(config)
  tensors = load_file(folder / 'model.safetensors')
  decoder = params['decoder']
  np.testing.assert_array_equal(
    tensors['shared.weight'], params['token_embedder']['embedding']
  )
  np.testing.assert_array_equal(
    tensors['lm_head.weight'].T, decoder['logits_dense']['kernel']
  )
  np.testing.assert_array_equal(
    tensors[
      'decoder.block.0.layer.0.SelfAttention.relative_attention_bias.weight'
    ].T,
    decoder['relpos_bias']['rel_embedding'],
  )


@pytest.mark.parametrize(
  ('changes', 'is_tied'),
  [
    # As transformers before 5 wrote T5 1.0, and T5 1.1.
    ({'scale_decoder_outputs': ABSENT, 'tie_word_embeddings': True}, True),
    ({'scale_decoder_outputs': ABSENT, 'tie_word_embeddings': ABSENT}, True),
    ({'scale_decoder_outputs': ABSENT, 'tie_word_embeddings': False}, False),
    # As transformers 5 writes them.
    ({'scale_decoder_outputs': True, 'tie_word_embeddings': True}, True),
    ({'scale_decoder_outputs': False, 'tie_word_embeddings': True}, False),
    ({'model_type': 'mt5', 'scale_decoder_outputs': ABSENT}, False),
    ({'model_type': 'umt5', 'tie_word_embeddings': True}, False),
  ],
)  # fmt: skip
def test_whether_logits_are_scaled(folder, changes, is_tied):
  change_json(folder / 'config.json', **changes)
  assert huggingface.read_config(folder).is_tied == is_tied


def test_logits_that_are_tied_but_not_scaled(folder):
  config = make_config()
  rewrite(folder, lambda tensors: tensors.pop('lm_head.weight'))
  params = huggingface.read_params(folder, config)
  expected = make_params(config)
  expected['decoder']['logits_dense']['kernel'] = expected['token_embedder'][
    'embedding'
  ].T
  assert_trees_equal(params, expected)


def test_copies_are_ignored_and_other_logits_are_not(tmp_path):
  config = make_config(is_tied=True)
  huggingface.save(tmp_path, config, make_params(config))
  rewrite(
    tmp_path,
    lambda t: t.update(
      {
        'encoder.embed_tokens.weight': t['shared.weight'],
        'decoder.embed_tokens.weight': t['shared.weight'],
        'lm_head.weight': t['shared.weight'],
        'decoder.block.0.layer.1.EncDecAttention.relative_attention_bias'
        '.weight': np.ones((8, 2), np.float32),
      }
    ),
  )
  assert_trees_equal(
    huggingface.read_params(tmp_path, config), make_params(config)
  )
  rewrite(
    tmp_path, lambda t: t.update({'lm_head.weight': t['shared.weight'] + 1})
  )
  with pytest.raises(
    ValueError, match=r'lm_head\.weight.*shared.*"tie_word_embeddings": false'
  ):
    huggingface.read_params(tmp_path, config)


@pytest.mark.parametrize('kind', ['t5', 'mt5', 'umt5'])
@pytest.mark.parametrize('stack', ['encoder', 'decoder'])
def test_embeddings_of_a_stack_alone_are_refused(tmp_path, kind, stack):
  config = make_config(has_layer_relpos=kind == 'umt5')
  huggingface.save(tmp_path, config, make_params(config))
  change_json(tmp_path / 'config.json', model_type=kind)
  name = f'{stack}.embed_tokens.weight'
  embeddings = np.asarray(make_params(config)['token_embedder']['embedding'])
  rewrite(tmp_path, lambda tensors: tensors.update({name: embeddings}))
  assert_trees_equal(
    huggingface.read_params(tmp_path, config), make_params(config)
  )
  rewrite(tmp_path, lambda tensors: tensors.update({name: embeddings + 1}))
  with pytest.raises(ValueError, match=f'{name} differs from shared.weight'):
    huggingface.read_params(tmp_path, config)


@pytest.mark.parametrize(
  ('changes', 'message'),
  [
    ({'model_type': 'longt5'}, "type is 'longt5'.*umt5"),
    ({'feed_forward_proj': 'gelu'}, "feed_forward_proj is 'gelu'"),
    ({'layer_norm_epsilon': 1e-5}, 'layer_norm_epsilon is 1e-05'),
    ({'d_model': None}, 'no d_model'),
    ({'num_decoder_layers': 0}, 'num_decoder_layers is 0'),
    ({'num_layers': 10**6}, 'num_layers is 1000000'),
    ({'num_layers': 900}, 'too few for'),
    ({'num_heads': '2'}, "num_heads is '2'"),
    ({'dropout_rate': 'low'}, "dropout_rate is 'low'"),
    ({'tie_word_embeddings': 'no'}, "tie_word_embeddings is 'no'"),
    ({'scale_decoder_outputs': 1}, 'scale_decoder_outputs is 1'),
    ({'feed_forward_proj': 5}, 'feed_forward_proj is 5'),
    ({'decoder_start_token_id': 2}, 'decoder_start_token_id is 2'),
    ({'pad_token_id': 5}, 'pad_token_id is 5'),
    ({'is_encoder_decoder': False}, 'is_encoder_decoder is False'),
    ({'quantization_config': {'bits': 8}}, 'quantization_config'),
    ({'dense_act_fn': 'relu'}, "dense_act_fn is 'relu'.*gelu_new"),
    ({'is_gated_act': False}, 'is_gated_act is False'),
    ({'scalable_attention': True}, 'scalable_attention is True'),
    ({'model_type': 'umt5', 'scalable_attention': False}, 'attention is False'),
    ({'relative_attention_num_buckets': 2}, r'config\.json.*2 buckets'),
    ({'model_type': 'umt5'}, 'block.1.*relative_attention'),
    ({'d_ff': 48}, r'wi_0.weight is \[24, 16\].*\[48, 16\]'),
    ({'vocab_size': 64}, r'shared.weight is \[32, 16\].*\[64, 16\]'),
    ({'num_layers': 3}, r'lacks .*encoder.block.2'),
    ({'num_layers': 1}, 'unexpected.*encoder.block.1'),
    ({'feed_forward_proj': 'relu'}, r'lacks .*.*DenseReluDense.wi.w'),
  ],
)
def test_networks_that_do_not_fit_are_refused(folder, changes, message):
  change_json(folder / 'config.json', **changes)
  with pytest.raises(ValueError, match=message):
    huggingface.read_params(folder, huggingface.read_config(folder))


def test_a_generation_config_with_another_start_is_refused(folder):
  path = folder / 'generation_config.json'
  path.write_text(json.dumps({'decoder_start_token_id': 0, 'pad_token_id': 0}))
  assert huggingface.read_config(folder) == make_config()
  path.write_text(json.dumps({'decoder_start_token_id': 2}))
  with pytest.raises(ValueError, match=r'generation_config.*is 2'):
    huggingface.read_config(folder)


@pytest.mark.parametrize(
  ('sizes', 'message'),
  [
    ({'relpos_num_buckets': 2}, '2 buckets'),
    ({'relpos_num_buckets': 32, 'relpos_max_distance': 16}, 'up to 16'),
  ],
)
def test_too_few_buckets_are_refused(sizes, message):
  with pytest.raises(ValueError, match=message):
    make_config(**sizes)


@pytest.mark.parametrize(
  ('sizes', 'message'),
  [
    ({'num_encoder_layers': 0}, 'without an encoder'),
    ({'mlp_activations': ('gelu',)}, r"no T5 with \('gelu',\)"),
    ({'has_layer_relpos': True, 'is_tied': True}, r'has_layer_relpos.*is_tied'),
  ],
)
def test_what_no_folder_can_hold_is_refused(tmp_path, sizes, message):
  config = make_config(**sizes)
  with pytest.raises(ValueError, match=message):
    huggingface.save(tmp_path, config, make_params(config))
  assert list(tmp_path.iterdir()) == []


def madlad_vocabulary() -> bytes:
  """A SentencePiece model with MADLAD-400's ids: unknown 0, padding 1, end 2,
  and languages to translate into."""
  sentencepiece = pytest.importorskip('sentencepiece')
  model = io.BytesIO()
  sentencepiece.SentencePieceTrainer.train(
    sentence_iterator=iter(['the quick brown fox jumps over the lazy dog'] * 9),
    model_writer=model,
    model_type='char',
    vocab_size=40,
    hard_vocab_limit=False,
    unk_id=0,
    bos_id=1,
    eos_id=2,
    user_defined_symbols=['<2de>', '<2fr>'],
    num_threads=1,
    minloglevel=2,
  )
  return model.getvalue()


def test_ids_of_madlad(tmp_path):
  """Also through a folder that is written here."""
  folder, copy = tmp_path / 'madlad', tmp_path / 'copy'
  folder.mkdir()
  (folder / 'spiece.model').write_bytes(madlad_vocabulary())
  vocabulary = vocabulary_files.read(folder, extra_ids=0)
  config = make_config(vocab_size=vocabulary.vocab_size)
  huggingface.save(folder, config, make_params(config))
  change_json(folder / 'config.json', pad_token_id=1, eos_token_id=2)
  stated = {'decoder_start_token_id': 0, 'pad_token_id': 1, 'eos_token_id': 2}
  (folder / 'generation_config.json').write_text(json.dumps(stated))
  command = ['convert', str(folder), str(copy), '--to', 'huggingface']
  assert main(command) == 0
  for path in (folder, copy):
    model = loading.load(str(path))
    assert model.config == config
    ids = model.vocabulary.encode('<2fr> the dog')
    assert '<2fr>' in map(model.vocabulary.id_to_text, ids)
    assert ids[-1:] == [2] == list(model.vocabulary.eos_ids)
    prompt = prompts.pack([ids], config=config, max_new_tokens=4)
    assert prompt.decoder_tokens.tolist() == [[0]]
