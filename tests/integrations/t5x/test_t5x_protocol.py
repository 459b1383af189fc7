"""What the T5X plug-in does with T5X's objects, on stand-ins for them.

The comparison with T5X itself is in `test_t5x`.
"""

import dataclasses
import functools
import importlib.util
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specdec_jax.base import Context, Params
from specdec_jax.integrations import t5x
from specdec_jax.integrations.t5x import decoding, t5_networks
from specdec_jax.models import families
from specdec_jax.models import t5 as t5_models
from tests import decoders, toy, toy_t5

GOLDEN = pathlib.Path(__file__).parents[2] / 'golden' / 't5x'
EOS = 1
LENGTH = 8


@dataclasses.dataclass(frozen=True)
class Sizes:
  """The fields of `t5x.examples.t5.network.T5Config`."""

  vocab_size: int = 7
  dtype: object = 'float32'
  emb_dim: int = 8
  num_heads: int = 2
  num_encoder_layers: int = 1
  num_decoder_layers: int = 1
  head_dim: int = 4
  mlp_dim: int = 12
  mlp_activations: tuple = ('gelu', 'linear')
  dropout_rate: float = 0.0
  logits_via_embedding: bool = False
  float32_attention_logits: bool = False


@dataclasses.dataclass(frozen=True)
class DecoderOnlySizes:
  """The fields of `t5x.examples.decoder_only.network.TransformerConfig`."""

  vocab_size: int = 7
  dtype: object = 'float32'
  emb_dim: int = 8
  num_heads: int = 2
  num_layers: int = 1
  head_dim: int = 4
  mlp_dim: int = 12
  mlp_activations: tuple = ('gelu', 'linear')
  dropout_rate: float = 0.0
  logits_via_embedding: bool = True


@dataclasses.dataclass(frozen=True)
class Network:
  config: object
  scan_layers: bool = False


class Vocabulary:
  eos_id = EOS
  vocab_size = 7

  def encode(self, text):
    return [int(word) for word in text.split()]


class Model:
  """A T5X model, as far as a decode_fn sees it."""

  def __init__(self, sizes=None, **network):
    self.module = Network(sizes or Sizes(), **network)
    self.output_vocabulary = Vocabulary()

  def _compute_logits_from_slice(
    self, state, params, encoded_inputs, raw_inputs, max_decode_length
  ):
    raise AssertionError('a step by one token is never taken')

  def step(self, params, encoder_tokens):
    """`tokens_to_logits` as T5X's encoder-decoder makes it."""
    return functools.partial(
      self._compute_logits_from_slice,
      params=params,
      encoded_inputs=None,
      raw_inputs=encoder_tokens,
      max_decode_length=LENGTH,
    )


def step_of(**keywords):
  return functools.partial(Model()._compute_logits_from_slice, **keywords)


@pytest.fixture(scope='module')
def target():
  config = t5_networks.config_of(Network(Sizes()))
  prompt = toy.prompt(
    [[0], [0], [0]],
    encoder_rows=[[3, 4, 3, 4, 1], [5, 1], [6, 6, 2, 1]],
  )
  return toy_t5.params(config, seed=8), config, prompt


def test_decode_fn_gives_the_greedy_tokens(target):
  params, config, prompt = target
  forced = jnp.zeros((3, LENGTH), jnp.int32).at[1, 1:3].set(4)

  @jax.jit
  def decode(params, encoder_tokens):
    return t5x.speculative_decode(
      inputs=forced,
      cache={},
      tokens_to_logits=Model().step(params, encoder_tokens),
      eos_id=EOS,
      num_decodes=1,
      decode_rng=jax.random.PRNGKey(0),
      cache_offset=0,
      gamma=2,
    )

  decodes, scores = decode(params, prompt.encoder_tokens)
  plain = decoders.plain(
    families.language_model(config),
    Params(params),
    toy.prompt(
      [[0], [0, 4, 4], [0]],
      encoder_rows=[[3, 4, 3, 4, 1], [5, 1], [6, 6, 2, 1]],
    ),
    to_probs=decoders.GREEDY,
    max_len=LENGTH + 1,
    eos_id=EOS,
  )
  assert decodes.shape == (3, 1, LENGTH)
  np.testing.assert_array_equal(decodes[:, 0], plain.tokens[:, 1:])
  assert decodes[1, 0, :2].tolist() == [4, 4]
  np.testing.assert_allclose(scores[:, 0], plain.log_probs.sum(1), atol=1e-4)


@pytest.mark.parametrize(
  ('step', 'message'),
  [
    (lambda state: state, "functools.partial.*lacks .'module'"),
    (step_of(max_decode_length=3), r"arguments are \['max_decode_length'\]"),
    (
      step_of(params={}, max_decode_length=3, soft_prompt=0),
      "'soft_prompt'.*This version",
    ),
  ],
)
def test_another_contract_is_refused(step, message):
  with pytest.raises(ValueError, match=message):
    t5x.speculative_decode(jnp.zeros((1, 4), jnp.int32), {}, step, EOS)


def test_bidirectional_inputs_are_refused():
  model = Model(DecoderOnlySizes())
  model._inputs_bidirectional_attention = True
  with pytest.raises(ValueError, match='causal models'):
    t5x.speculative_decode(
      jnp.zeros((1, 4), jnp.int32), {}, model.step({}, None), EOS
    )


@pytest.mark.parametrize(
  ('kwargs', 'message'),
  [
    ({'num_decodes': 4}, 'num_decodes is 4'),
    ({'cache_offset': 1}, 'scans its layers'),
    ({'drafter': 'model'}, 'decode_fn.*no draft'),
    ({'drafter': 'oracle'}, "'oracle'.*prompt_lookup"),
    ({'verification': 'best'}, "'best'.*speculative_sampling"),
    (
      {'verification': 'greedy', 'temperature': 0.5},
      'greedy.*temperature 0, got 0.5',
    ),
    ({'temperature': 1e-38}, '1e-06.*got 1e-38'),
    ({'drafter': 'ngram'}, 'ngram needs ngram_text'),
    ({'ngram_text': 'x'}, 'ngram_text is for drafter ngram, not'),
    ({'drafter': 'block_heads'}, "'block_heads' needs.*drafter_checkpoint"),
    ({'drafter_checkpoint': 'x'}, "'prompt_lookup' takes.*drafter_checkpoint"),
    ({'lenience': 0.5}, 'lenience 0.5 .*temperature 0'),
    ({'beta': 2}, 'beta is for verification top_beta, not'),
    ({'gamma': 0}, 'gamma.*got 0'),
    ({'top_k': -1}, 'top_k.*at least 1, or None, which keeps all'),
    ({'top_p': 0}, 'top_p.*where 1 keeps all: got 0'),
  ],
)
def test_bad_settings_are_one_sentence(target, kwargs, message):
  params, _, prompt = target
  with pytest.raises(ValueError, match=message):
    t5x.speculative_decode(
      jnp.zeros((3, LENGTH), jnp.int32),
      {},
      Model().step(params, prompt.encoder_tokens),
      EOS,
      **kwargs,
    )


@dataclasses.dataclass(frozen=True)
class SizesOfTomorrow(Sizes):
  num_experts: int = 8


@pytest.mark.parametrize(
  ('network', 'message'),
  [
    (Network(Sizes(), scan_layers=True), 'scans its layers'),
    (Network(SizesOfTomorrow()), r"also has \['num_experts'\]"),
    (Network(None), 'not a network'),
    (
      Network(Sizes(mlp_activations=('swish', 'linear'))),
      r"\['swish'\] are none",
    ),
  ],
)
def test_other_networks_are_refused(network, message):
  with pytest.raises(ValueError, match=message):
    t5_networks.config_of(network)


def test_sizes_are_read():
  config = t5_networks.config_of(Network(Sizes(dtype=jnp.bfloat16)))
  assert (config.num_encoder_layers, config.dtype) == (1, jnp.bfloat16)
  config = t5_networks.config_of(Network(DecoderOnlySizes()))
  assert (config.num_encoder_layers, config.is_tied) == (0, True)


@pytest.mark.parametrize('is_tied', [False, True])
def test_parameters_have_the_dtypes_that_t5x_computes_with(is_tied):
  config = toy_t5.config(7, is_tied=is_tied, dtype=jnp.dtype(jnp.bfloat16))
  params = toy_t5.params(dataclasses.replace(config, dtype='float32'), seed=0)
  cast = t5_networks.params_of(params, config, role='target')
  in_float32 = [
    jax.tree_util.keystr(path, simple=True, separator='/')
    for path, leaf in jax.tree_util.tree_leaves_with_path(cast)
    if leaf.dtype == jnp.float32
  ]
  last = (
    'token_embedder/embedding' if is_tied else 'decoder/logits_dense/kernel'
  )
  assert in_float32 == [last]


@pytest.mark.parametrize(
  ('sizes', 'params', 'message'),
  [
    ({'mlp_dim': 13}, {}, r'the target .*mlp/wi_0/kernel is'),
    ({}, {'extra': np.zeros(1)}, r'the target has 1 .*extra'),
    ({}, {'encoder': None}, r'the target lacks .*encoder'),
  ],
)
def test_other_parameters_are_refused(target, sizes, params, message):
  own_params, config, _ = target
  config = dataclasses.replace(config, **sizes)
  params = own_params | params
  params = {name: leaf for name, leaf in params.items() if leaf is not None}
  with pytest.raises(ValueError, match=message):
    t5_networks.params_of(params, config, role='target')


def decoder(draft, *, drafter='model', **settings):
  return decoding.decoder(
    Network(Sizes()),
    Vocabulary(),
    draft_module=draft,
    drafter=drafter,
    **settings,
  )


@pytest.mark.parametrize(
  ('draft', 'settings', 'message'),
  [
    (Network(Sizes(vocab_size=6)), {}, r'7 token ids.*6'),
    (Network(DecoderOnlySizes()), {}, 'draft_module decoder-o'),
    (None, {}, r"'model' needs.*draft_module"),
    (
      Network(Sizes()),
      {'drafter': 'prompt_lookup'},
      "'prompt_lookup' takes no draft_module",
    ),
    (
      None,
      {'drafter': 'ngram', 'ngram_text': '/nowhere'},
      r'ngram_text.*nowhere',
    ),
    (
      None,
      {'drafter': 'ngram', 'ngram_text': 's3://bucket/text'},
      's3://bucket/text is neither',
    ),
  ],
)
def test_drafters_that_do_not_fit_are_refused(draft, settings, message):
  with pytest.raises(ValueError, match=message):
    decoder(draft, **settings)


def test_parameters_without_those_of_the_draft_model_are_refused(target):
  params, _, prompt = target
  with pytest.raises(ValueError, match=r"draft model at .*'draft'.* lacks"):
    decoding.decode(
      params,
      None,
      prompt,
      decoder=decoder(Network(Sizes())),
      max_len=4,
      eos_id=EOS,
    )


@pytest.mark.slow
def test_a_draft_model_may_be_padded_further(target):
  params, _, prompt = target
  padded = decoder(Network(Sizes(vocab_size=9)), gamma=2)
  draft = toy_t5.params(padded.drafting.config, seed=1)
  tokens = []
  for each in (padded, decoder(None, drafter='none')):
    decode = functools.partial(
      decoding.decode, decoder=each, max_len=LENGTH, eos_id=EOS
    )
    output = jax.jit(decode)(params | {'draft': draft}, None, prompt)
    tokens.append(np.asarray(output.tokens))
  np.testing.assert_array_equal(*tokens)


def test_ngram_text_is_counted(tmp_path):
  text = tmp_path / 'text'
  text.write_text('2 3 2 3 2 4')
  made = decoder(None, drafter='ngram', ngram_text=str(text))
  context = Context(tokens=jnp.array([[2, 0]]), lengths=jnp.array([1]))
  draft, _ = made.drafter.propose(
    (), jax.random.split(jax.random.key(0), 1), context, ()
  )
  assert draft.tokens.tolist() == [[3, 2, 3, 2]]


def test_continuations_are_moved_to_the_left():
  inputs = jnp.asarray([[0, 5, 6, 0, 0], [0, 0, 0, 0, 0], [0, 2, 3, 4, 5]])
  prompt = decoding.prompt_of(None, inputs)
  assert prompt.decoder_lengths.tolist() == [3, 1, 5]
  output = decoders.plain(
    toy.toy(7),
    Params(toy.toy_params(7, seed=1)),
    prompt,
    to_probs=decoders.GREEDY,
    max_len=6,
  )
  moved = decoding.continuation(output, prompt)
  tokens = np.asarray(output.tokens)
  for row, length in enumerate([3, 1, 5]):
    new = tokens[row, length:]
    np.testing.assert_array_equal(moved[row, : len(new)], new)
    assert not np.asarray(moved)[row, len(new) :].any()


@pytest.fixture(scope='module')
def sampler(target):
  """Rows sampled with a key."""
  params, _, prompt = target
  decode = jax.jit(
    functools.partial(
      decoding.decode,
      decoder=decoder(None, drafter='prompt_lookup', temperature=1.0),
      max_len=LENGTH,
      eos_id=-1,
    )
  )
  return lambda rng_key: decoders.rows(decode(params, rng_key, prompt))


@pytest.mark.slow
@pytest.mark.parametrize('key_impl', ['threefry2x32', 'rbg', 'unsafe_rbg'])
def test_samples_do_not_depend_on_the_kind_of_t5x_s_keys(sampler, key_impl):
  """T5X hands raw keys over, of whatever kind JAX's default is."""
  with jax.default_prng_impl(key_impl):
    found = sampler(jax.random.PRNGKey(3))
    without = sampler(None)
  assert found == sampler(jax.random.key(3, impl='threefry2x32'))
  assert without == sampler(jax.random.key(0, impl='threefry2x32'))
  assert len({tuple(row) for row in found}) == 3


def golden_sizes() -> t5_models.T5Config:
  """Of the checkpoints of `tests/golden/t5x`."""
  return dataclasses.replace(
    toy_t5.config(128, num_layers=2),
    embed_dim=64,
    num_heads=4,
    head_dim=16,
    mlp_dim=128,
    relpos_num_buckets=32,
    relpos_max_distance=128,
  )


@pytest.mark.parametrize('folder', ['t5x_orbax', 't5x_legacy'])
def test_load_draft_reads_both_formats(folder):
  expected = families.param_shapes(golden_sizes())
  path = str(GOLDEN / folder / 'checkpoint_7')
  restored = {'target': {'decoder': 'of the target'}, 'state': {'step': 7}}
  joined = t5x.load_draft(
    restored, {'target': {'draft': expected}}, path=path, is_resuming=False
  )
  assert joined['target']['decoder'] == 'of the target'
  assert joined['state'] == {'step': 7}
  assert jax.tree.map(np.shape, joined['target']['draft']) == jax.tree.map(
    lambda leaf: leaf.shape, expected
  )
  assert 'draft' not in restored['target']
  assert t5x.load_draft(restored, {}, path=path, is_resuming=True) is restored
  with pytest.raises(ValueError, match='no draft model'):
    t5x.load_draft(restored, {'target': {}}, path=path)


@pytest.mark.skipif(
  getattr(importlib.util.find_spec('t5x'), 'origin', None) is not None,
  reason='T5X is here',
)
@pytest.mark.parametrize('kind', ['EncoderDecoder', 'DecoderOnly'])
def test_without_t5x_models_say_what_to_install(kind):
  with pytest.raises(ImportError, match=r'install.*docs/t5x.md'):
    getattr(t5x, f'Speculative{kind}Model')
