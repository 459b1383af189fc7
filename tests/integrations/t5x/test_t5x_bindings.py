"""What a user's gin files bind for T5X's own model, where the plug-in stands.

With the real T5X and gin, in this process, on models that are only traced.
"""

import contextlib
import copy
import functools
import importlib.util
import pathlib
import warnings

import jax
import jax.numpy as jnp
import pytest

from specdec_jax.integrations.t5x import decoding as t5x_decoding
from specdec_jax.integrations.t5x import t5_networks
from specdec_jax.models import families
from tests.integrations.t5x import test_t5x
from tests.integrations.t5x.t5x_gins import gin_files

pytestmark = test_t5x.pytestmark
KINDS = test_t5x.KINDS
GINS = test_t5x.ROOT / 'gin_configs'
STOCK = {
  'encoder_decoder': 'models.EncoderDecoderModel',
  'decoder_only': 'models.DecoderOnlyModel',
}
PLUGIN = {
  'encoder_decoder': 'speculation.SpeculativeEncoderDecoderModel',
  'decoder_only': 'speculation.SpeculativeDecoderOnlyModel',
}
USER = """
from __gin__ import dynamic_registration
from specdec_jax.integrations import t5x as speculation
from t5x import decoding
from t5x import models
from t5x import utils
DROPOUT_RATE = 0.0
"""
SHAPE = (2, 8)


@pytest.fixture(scope='module', autouse=True)
def t5x_as_it_is():
  """T5X warns, and promotes dtypes and ranks, while it is imported and runs."""
  with (
    warnings.catch_warnings(),
    jax.numpy_dtype_promotion('standard'),
    jax.numpy_rank_promotion('allow'),
  ):
    warnings.simplefilter('ignore')
    yield


@pytest.fixture
def parse(tmp_path):
  """Parses the gin files of a model, of the plug-in and lines of the user's."""
  import gin

  root = pathlib.Path(importlib.util.find_spec('t5x').origin).parents[1]

  def parse(kind: str, *lines: str, added: tuple[str, ...] | None = None):
    model, draft = gin_files(kind, tmp_path)
    names = (kind,) if added is None else added
    texts = [pathlib.Path(model).read_text()]
    # What a user has of their own comes before the plug-in's file.
    texts.append(USER + '\n'.join(lines))
    texts += [(GINS / 't5x' / f'{name}.gin').read_text() for name in names]
    if any(name.startswith('draft') for name in names):
      texts.append(pathlib.Path(draft).read_text())
    # gin finds the files of a folder that is no package from here alone.
    with contextlib.chdir(root):
      for text in texts:
        gin.parse_config(text)
    return functools.partial(value_of, gin)

  with contextlib.ExitStack() as stack:
    stack.callback(gin.clear_config, clear_constants=False)
    yield parse


def value_of(gin, name: str):
  """What a macro stands for, made."""
  return copy.deepcopy(gin.query_parameter(f'{name}/gin.macro.value'))


def predict(model, **kwargs):
  """Shapes of a prediction, from a trace."""
  batch = {
    name: jax.ShapeDtypeStruct(SHAPE, jnp.int32)
    for name in (
      'encoder_input_tokens',
      'decoder_input_tokens',
      'decoder_causal_attention',
    )
  }
  params = families.param_shapes(t5_networks.config_of(model.module))
  return jax.eval_shape(
    functools.partial(model.predict_batch_with_aux, **kwargs), params, batch
  )


@pytest.mark.parametrize('kind', KINDS)
def test_several_decodes_are_refused_however_they_are_asked_for(parse, kind):
  method = f'{STOCK[kind]}.predict_batch_with_aux.num_decodes'
  model = parse(kind, f'{method} = 4')('MODEL')
  with pytest.raises(ValueError, match='num_decodes is 4'):
    predict(model)


def test_several_decodes_by_default_decoder_params_are_refused(parse):
  model = parse(
    'encoder_decoder',
    f'{STOCK["encoder_decoder"]}.default_decoder_params = '
    '@models.DecoderParams()',
    'models.DecoderParams.num_decodes = 4',
  )('MODEL')
  with pytest.raises(ValueError, match='num_decodes is 4'):
    predict(model)


@pytest.mark.parametrize('kind', KINDS)
def test_arguments_of_prediction_are_honoured(parse, kind):
  method = f'{STOCK[kind]}.predict_batch_with_aux.return_all_decodes'
  model = parse(kind, f'{method} = True')('MODEL')
  tokens, aux = predict(model)
  assert tokens.shape == (2, 1, 8)
  assert aux['scores'].shape == (2, 1)
  # The caller's own word counts, as everywhere in gin.
  assert predict(model, return_all_decodes=False)[0].shape == SHAPE


@pytest.mark.parametrize('kind', KINDS)
def test_sampling_is_that_of_the_users_decode_fn(parse, kind):
  lines = (
    f'{STOCK[kind]}.decode_fn = @decoding.temperature_sample',
    'decoding.temperature_sample:',
    '  temperature = 0.5',
    '  topk = 3',
  )
  sampling = parse(kind, *lines)('MODEL').decoder.sampling
  assert (sampling.temperature, sampling.top_k) == (0.5, 3)
  assert sampling.top_p is None


@pytest.mark.parametrize('kind', KINDS)
def test_the_plug_ins_own_sampling_counts_first(parse, kind):
  lines = (
    f'{STOCK[kind]}.decode_fn = @decoding.temperature_sample',
    'decoding.temperature_sample.temperature = 0.5',
    'decoding.temperature_sample.topk = 0',
    'decoding.temperature_sample.topp = 0.9',
    f'{PLUGIN[kind]}.temperature = 0.25',
    f'{PLUGIN[kind]}.bad_words_ids = [[5], [7, 8]]',
    f'{PLUGIN[kind]}.logit_bias = {{5: -2.5}}',
  )
  sampling = parse(kind, *lines)('MODEL').decoder.sampling
  assert (sampling.temperature, sampling.top_k) == (0.25, None)
  assert sampling.top_p == 0.9
  assert sampling.bad_words_ids == [[5], [7, 8]]
  assert sampling.logit_bias == {5: -2.5}


def test_sampling_of_the_model_files_as_they_are(parse):
  """T5X's files of `decoder_only` sample; those of T5 search with one beam."""
  sampling = parse('decoder_only')('MODEL').decoder.sampling
  assert (sampling.temperature, sampling.top_k) == (1.0, 40)


def test_the_default_of_t5_s_files_is_greedy(parse):
  assert parse('encoder_decoder')('MODEL').decoder.sampling.is_greedy


@pytest.mark.parametrize(
  ('lines', 'message'),
  [
    (
      ['decode_fn = @decoding.beam_search', 'decoding.beam_search.alpha = 0.9'],
      r"beam_search .*\['alpha'\]",
    ),
    (
      [
        'decode_fn = @decoding.temperature_sample',
        'decoding.temperature_sample.max_decode_steps = 3',
      ],
      r"temperature_sample .*\['max_decode_steps'\]",
    ),
    (['decode_fn = @warm/decoding.temperature_sample'], 'decode_fn.*scope'),
    (['decode_fn = @models.remove_prefix'], 'decode_fn .*remove_prefix'),
    (
      [
        'decode_fn = @decoding.temperature_sample',
        'decoding.temperature_sample.topp = 0.5',
      ],
      'topk 1.*topp 0.5',
    ),
  ],
)
def test_what_cannot_be_honoured_is_refused(parse, lines, message):
  name = STOCK['encoder_decoder']
  value = parse('encoder_decoder', f'{name}.{lines[0]}', *lines[1:])
  with pytest.raises(ValueError, match=message):
    value('MODEL')


@pytest.mark.parametrize('kind', KINDS)
def test_decode_fn_samples_as_the_one_that_it_replaces(
  parse, kind, monkeypatch
):
  settings = []
  decode = t5x_decoding.decode

  def record(*args, decoder, **kwargs):
    settings.append((decoder.sampling.temperature, decoder.sampling.top_k))
    return decode(*args, decoder=decoder, **kwargs)

  monkeypatch.setattr(t5x_decoding, 'decode', record)
  model = parse(
    kind,
    'decoding.temperature_sample.temperature = 0.5',
    'decoding.temperature_sample.topk = 3',
    added=('decode_fn',),
  )('MODEL')
  predict(model)
  assert settings == [(0.5, 3)]


@pytest.mark.parametrize('kind', KINDS)
def test_other_arguments_of_the_users_model_are_honoured(parse, kind):
  model = parse(kind, f'{STOCK[kind]}.label_smoothing = 0.25')('MODEL')
  assert model._label_smoothing == 0.25
  converter = f'{STOCK[kind]}.feature_converter_cls = @models.DecoderParams'
  assert parse(kind, converter)('MODEL').FEATURE_CONVERTER_CLS.__name__ == (
    'DecoderParams'
  )


@pytest.mark.parametrize('kind', KINDS)
def test_misspelt_arguments_are_named(parse, kind):
  value = parse(kind, f'{PLUGIN[kind]}.temprature = 0.5')
  with pytest.raises(ValueError, match='temprature'):
    value('MODEL')
