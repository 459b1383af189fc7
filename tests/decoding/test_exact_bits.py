"""One width for every call of the target: bits do not depend on drafts."""

import dataclasses
import functools
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import specdec_jax
from specdec_jax import drafters
from specdec_jax.base import Params, Prompt, Tree
from specdec_jax.decoding import exact_bits, speculative
from specdec_jax.decoding.method import Method
from specdec_jax.models import families, layers
from specdec_jax.models.products import with_cpu_copies
from specdec_jax.sampling import logits
from tests import toy, toy_eagle, toy_families, toy_gemma, toy_t5, toy_tree
from tests.cli import tiny

# As real networks are compiled; no dimension fills whole vectors of 16.
pytestmark = pytest.mark.optimized
VOCAB_SIZE = 517
SIZES = {'embed_dim': 72, 'head_dim': 24, 'mlp_dim': 104}
CONFIGS = {
  'Llama': toy.llama_config(VOCAB_SIZE),
  'Qwen3': toy.llama_config(VOCAB_SIZE, **toy.LATER_LLAMA),
  'Mistral': toy.llama_config(VOCAB_SIZE, windows=(3,)),
  'T5 1.1': toy_t5.config(VOCAB_SIZE, num_layers=2),
  'T5 1.0': toy_t5.config(VOCAB_SIZE, mlp_activations=('relu',), is_tied=True),
  'T5, decoder only': toy_t5.config(VOCAB_SIZE, num_encoder_layers=0),
  'Gemma 2': toy_gemma.gemma_2(VOCAB_SIZE),
  'Gemma 3': toy_gemma.decoder(VOCAB_SIZE),
  'Gemma 4, E2B': toy_gemma.gemma_4_e2b(VOCAB_SIZE),
  'Gemma 4, experts': toy_gemma.gemma_4_moe(VOCAB_SIZE),
  'T5Gemma': toy_gemma.encoder_decoder(VOCAB_SIZE),
}


def check(
  name: str,
  gamma: int,
  batch_size: int,
  tree: Tree | None = None,
  *,
  dtype=jnp.bfloat16,
  made=exact_bits.of_one_width,
) -> None:
  """The self-test, of a small network."""
  fields = {field.name for field in dataclasses.fields(CONFIGS[name])}
  sizes = {key: size for key, size in SIZES.items() if key in fields}
  config = dataclasses.replace(CONFIGS[name], dtype=dtype, **sizes)
  params = families.init_params(config, jax.random.key(1))
  params = jax.tree.map(lambda x: x.astype(dtype), params)
  zeros = lambda width: np.zeros((batch_size, width), np.int32)
  method = Method(
    target=families.language_model(config),
    drafter=drafters.none(gamma)._replace(tree=tree),
    logits_to_probs=logits.standardize(temperature=0.0),
    eos_id=-1,
  )
  exact_bits.check(
    made(method),
    with_cpu_copies(params, is_tied=config.is_tied),
    Prompt(
      encoder_tokens=zeros(11) if families.has_encoder(config) else None,
      decoder_tokens=zeros(20),
      decoder_lengths=np.ones(batch_size, np.int32),
      row_ids=np.arange(batch_size),
    ),
    max_len=72,
  )


@pytest.mark.slow
@pytest.mark.parametrize('batch_size', [1, 5])
@pytest.mark.parametrize('gamma', [4, 7])
@pytest.mark.parametrize('name', CONFIGS)
def test_no_bit_depends_on_place_or_company(name, gamma, batch_size):
  check(name, gamma, batch_size)


@pytest.mark.slow
@pytest.mark.parametrize('name', ['Llama', 'T5 1.0', 'Gemma 2'])
def test_no_bit_depends_on_the_place_in_tiles(name, monkeypatch):
  """In float32, five rows by tiles of 64 columns, the logits' among them."""
  sizes = {'embed_dim': 64, 'head_dim': 16, 'mlp_dim': 128, 'vocab_size': 576}
  monkeypatch.setattr(sys.modules[__name__], 'SIZES', sizes)
  check(name, 4, 1, dtype=jnp.float32)


@pytest.mark.slow
@pytest.mark.parametrize(
  ('name', 'dtype'),
  [('Qwen3', 'float32'), ('T5 1.1', 'bfloat16'), ('Gemma 2', 'bfloat16')],
)
def test_no_bit_depends_on_the_path_taken(name, dtype):
  check(name, 6, 3, toy_tree.BENT, dtype=jnp.dtype(dtype))


@pytest.mark.slow
@pytest.mark.parametrize('batch_size', [1, 5])
@pytest.mark.parametrize('tree', [(3, 2), (2, 1, 1, 1)], ids=str)
@pytest.mark.parametrize('name', CONFIGS)
def test_no_bit_depends_on_the_shape_of_a_tree(name, tree, batch_size):
  shape = toy_tree.shape(*tree)
  check(name, len(shape.parents), batch_size, shape)


@pytest.mark.slow
def test_the_self_test_sees_paths_that_lie_among_siblings():
  """In float32: bfloat16 rounds off what sums of so few terms differ by."""
  with pytest.raises(ValueError, match='exact_bits'):
    check(
      'Qwen3', 6, 3, toy_tree.BENT, dtype=jnp.float32, made=lambda made: made
    )


def test_a_norm_has_the_same_bits_at_every_place():
  norm = jax.jit(layers.RMSNorm().apply)
  draw = np.random.default_rng(0).normal
  params = {'params': {'scale': np.ones(576, np.float32)}}
  # Fives, as 4 of them are a vector and the last is none.
  for _ in range(20):
    rows = draw(size=(40, 576)).astype(np.float32)
    one, other = (
      np.asarray(norm(params, np.roll(rows, by, 0).reshape(8, 5, 576)))
      for by in (0, 1)
    )
    np.testing.assert_array_equal(
      np.roll(one.reshape(40, 576), 1, 0), other.reshape(40, 576)
    )


def test_the_self_test_sees_calls_of_another_width(monkeypatch):
  oracle = exact_bits._oracle
  monkeypatch.setattr(
    exact_bits,
    '_oracle',
    lambda *args: oracle(*args)._replace(may_abstain=True),
  )
  with pytest.raises(ValueError, match='exact_bits'):
    check('Llama', 4, 1)


def test_features_that_a_drafter_reads_change_no_bit():
  """XLA leaves out what nobody reads, and then multiplies and sums long prompts
  in another order."""
  width, sizes = 600, {'embed_dim': 64, 'head_dim': 16, 'mlp_dim': 170}
  config = toy.llama_config(64, num_layers=3, dtype=jnp.bfloat16, **sizes)
  own = toy_eagle.config(config, feature_layers=(1, 2))
  target, network = toy_families.networks(config, own, gamma=3)
  method = Method(
    target=target,
    drafter=drafters.autoregressive(
      drafters.eagle(network),
      gamma=3,
      logits_to_probs=logits.standardize(temperature=0.0),
      is_argmax=True,
    ),
    logits_to_probs=logits.standardize(temperature=0.0),
    eos_id=-1,
  )
  weights = toy.llama_params(config, seed=0)
  joined = toy_eagle.joined(weights, toy_eagle.params(own, seed=1))
  rng = np.random.default_rng(0)
  prompt = toy.prompt(
    [rng.integers(1, 60, width - i).tolist() for i in range(8)]
  )
  params, one_width = Params(weights, joined), exact_bits.of_one_width(method)

  def run(method: Method):
    options = {'method': method, 'max_len': width + 12}
    # What is left out depends on all that one program computes.
    generate = jax.jit(functools.partial(speculative.generate, **options))
    return generate(params, jax.random.key(0), prompt)

  drafted, plain = run(one_width), run(exact_bits.plain(one_width))
  assert plain.statistics.num_drafted.sum() == 0
  assert drafted.statistics.num_drafted.sum() > 0
  for name in ('tokens', 'log_probs'):
    np.testing.assert_array_equal(getattr(drafted, name), getattr(plain, name))


def completed(decoder, batch_size: int = 2) -> list:
  texts = ['The old man and the old man and', 'One, two, three, one, two,']
  made = specdec_jax.generate(
    decoder, texts, max_new_tokens=24, batch_size=batch_size
  )
  return [*made]


def bits(made: list) -> list:
  return [(each.tokens, np.asarray(each.log_probs).tobytes()) for each in made]


def decoded(decoder, batch_size: int = 2) -> list:
  return bits(completed(decoder, batch_size))


def load(**options):
  return specdec_jax.load('lm-nano', dtype='bfloat16', gamma=3, **options)


@pytest.fixture
def assert_refused(monkeypatch, capfd):
  """Lets the self-test fail; runs commands that should then be refused."""

  def fail(*args, **options):
    raise ValueError('exact_bits is not possible')

  def refused(*argv):
    result = tiny.run(capfd, *argv)
    assert (result.status, result.out) == (2, ''), result
    assert 'exact_bits is not possible' in result.err

  monkeypatch.setattr(exact_bits, 'check', fail)
  monkeypatch.setenv('JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS', '0')
  return refused


def test_the_self_test_comes_before_the_first_text(assert_refused):
  assert decoded(load())
  with pytest.raises(ValueError, match='is not possible'):
    decoded(load(exact_bits=True))
  flags = ('--model', 'lm-nano', '--gamma', '3', '--prompt', 'a')
  assert_refused('generate', *flags, '--exact_bits')


@pytest.mark.parametrize('options', [{}, {'num_continuations': 2}], ids=str)
def test_drafts_change_no_bit_of_bfloat16(options):
  drafted = load(exact_bits=True, **options)
  plain = drafted.at(0)
  made = completed(drafted)
  assert bits(made) == decoded(plain)
  assert sum(each.statistics['accepted'] for each in made) > 0
  with pytest.raises(ValueError, match='plain decoding has no gamma'):
    plain.at(3)


@pytest.mark.slow
def test_another_door_has_the_same_bits_and_the_setting_is_needed():
  drafted = load(exact_bits=True)
  plain = load(exact_bits=True, drafter='none')
  assert decoded(drafted) == decoded(plain)
  [text] = specdec_jax.generate(drafted.at(0), ['a'], max_new_tokens=1)
  assert text.gamma == 0
  # On jax 0.12 a pair of rows has the bits of a block; a lone row has not.
  assert decoded(load(), 1) != decoded(load().at(0), 1)


@pytest.mark.slow
def test_a_tree_without_exact_bits_has_a_plain_decoder_too():
  drafted = specdec_jax.load('lm-nano', gamma=3, num_continuations=2)
  tokens = lambda decoder: [each for each, _ in decoded(decoder)]
  assert tokens(drafted) == tokens(drafted.at(0))


@pytest.mark.slow
def test_the_self_test_is_greedy_for_sampled_rows_too():
  assert decoded(load(exact_bits=True, temperature=1.0))


@pytest.mark.parametrize(
  ('options', 'message'),
  [
    ({'exact_bits': True, 'drafter': 'none'}, 'exact_bits'),
    ({'exact_bits': True, 'gamma': 'auto'}, 'exact_bits'),
    (
      {'drafter': 'none', 'gamma': 2, 'tree': (0, 0)},
      'plain decoding has a tree only',
    ),
    (
      {'drafter': 'none', 'gamma': 2, 'num_continuations': 2},
      'plain decoding has a tree only',
    ),
  ],
  ids=str,
)
def test_plain_decoding_and_exact_bits_need_one_width(options, message):
  with pytest.raises(ValueError, match=message):
    specdec_jax.load('lm-nano', **options)
