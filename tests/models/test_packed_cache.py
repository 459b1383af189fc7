"""Caches of integers: a model that has one is decoded as any other."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import specdec_jax
from specdec_jax import drafters, verification
from specdec_jax.assembly import models
from specdec_jax.assembly.models import Model
from specdec_jax.base import Params
from specdec_jax.checkpoints import model_file, safetensors_model
from specdec_jax.decoding import refill
from specdec_jax.models import families, kv_cache
from tests import decoders, slow, toy, toy_gemma, toy_t5, toy_tree, trial
from tests.cli import tiny
from tests.models.test_used_cache import attend, drawn, placement

V = 12
ROWS = [[3, 4, 5], [2], [7, 9], [10, 4, 4]]
CONFIGS = {
  'Llama': toy.llama_config(V, num_layers=2),
  'Llama, windows': toy.llama_config(V, num_layers=2, windows=(3, 0)),
  'T5': toy_t5.config(V, num_layers=2),
  'Gemma 3': toy_gemma.decoder(V),
  'T5Gemma': toy_gemma.encoder_decoder(V),
}
# And those whose errors are greater with these weights.
ALL_CONFIGS = CONFIGS | {
  'Gemma 4': toy_gemma.gemma_4(V),
  'Gemma 4, layers that share keys': toy_gemma.gemma_4_e2b(V),
}
every_network = slow.parametrize('name', CONFIGS, now=['T5'])


def packed(config):
  return dataclasses.replace(config, cache_dtype=jnp.dtype('int8'))


def params_of(name: str):
  make = toy_t5.params if name == 'T5' else toy_gemma.params
  make = toy.llama_params if 'Llama' in name else make
  return make(ALL_CONFIGS[name], seed=1)


def prompt_of(name: str):
  has_encoder = families.has_encoder(ALL_CONFIGS[name])
  return toy.prompt(ROWS, width=3, encoder_rows=ROWS if has_encoder else None)


def whole(entries: kv_cache.Packed):
  return entries.values.astype(jnp.float32) * entries.scale


def test_integers_are_the_nearest_and_nan_stays():
  rng = np.random.default_rng(0)
  entries = rng.normal(size=(2, 3, 5, 8)).astype(np.float32)
  entries[0, 1, 2], entries[1, 0, 0, 3] = 0, np.nan
  found = kv_cache.packed(entries)
  assert (found.values.shape, found.values.dtype) == ((2, 3, 5, 8), jnp.int8)
  assert (found.scale.shape, found.scale.dtype) == ((2, 3, 5, 1), jnp.float32)
  is_nan = np.isnan(whole(found))
  assert is_nan[1, 0, 0].all()
  assert is_nan.sum() == 8
  assert not whole(found)[0, 1, 2].any()
  error = np.abs(whole(found) - entries)[~is_nan]
  half = np.broadcast_to(0.5001 * found.scale, is_nan.shape)[~is_nan]
  assert np.all(error <= half)


@pytest.mark.parametrize('used_only', [False, True])
@pytest.mark.parametrize('kind', ['text', 'window', 'tree'])
def test_attention_reads_what_integers_stand_for(kind, used_only):
  queries, keys, values, bias = drawn()
  both = kv_cache.packed(keys), kv_cache.packed(values)
  rest = placement(kind).mask, bias
  found = attend(queries, *both, *rest, softcap=2.0, used_only=used_only)
  expected = attend(queries, *map(whole, both), *rest, softcap=2.0)
  np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)
  assert np.abs(found - attend(queries, keys, values, *rest)).max() > 1e-3


@pytest.mark.slow
@every_network
def test_logits_are_nearly_those_of_a_whole_cache(name):
  def logits_of(config):
    model = toy.compiled(families.language_model(config))
    params, prompt = params_of(name), prompt_of(name)
    cache = model.init(params, prompt, 24)
    kinds = {leaf.dtype.name for leaf in jax.tree.leaves(cache.keys)}
    logits, _ = model.extend(params, prompt.decoder_tokens, cache)
    return np.asarray(logits), kinds

  found, kinds = logits_of(packed(CONFIGS[name]))
  expected, _ = logits_of(CONFIGS[name])
  assert kinds == {'int8', 'float32'}
  assert 1e-5 < np.abs(found - expected).max() < 0.02 * np.abs(expected).max()


@pytest.mark.slow
@pytest.mark.parametrize('name', ALL_CONFIGS)
def test_logits_are_those_of_a_whole_cache_that_was_rounded(name, monkeypatch):
  """How far these are from those without rounding depends on the weights: with
  most seeds a few hundredths of the greatest logit, with some far more."""
  config = ALL_CONFIGS[name]
  params, prompt = params_of(name), prompt_of(name)

  def logits_of(config):
    # Layers are traced once per process, with the functions of that time.
    jax.clear_caches()
    model = toy.compiled(families.language_model(config))
    cache = model.init(params, prompt, 24)
    logits, _ = model.extend(params, prompt.decoder_tokens, cache)
    return np.asarray(logits)

  def rounded(entries):
    return whole(kv_cache.packed(entries)).astype(entries.dtype)

  append = kv_cache.append
  found, unrounded = logits_of(packed(config)), logits_of(config)
  with monkeypatch.context() as patch:
    patch.setattr(kv_cache, '_stored', lambda _, entries: rounded(entries))
    patch.setattr(
      kv_cache,
      'append',
      lambda buffer, new, lengths: append(buffer, rounded(new), lengths),
    )
    expected = logits_of(config)
  jax.clear_caches()
  scale = np.abs(unrounded).max()
  np.testing.assert_allclose(found, expected, rtol=0, atol=2e-5 * scale)
  assert np.abs(found - unrounded).max() > 1e-3 * scale


# A chain that is often wrong, and a tree.
DRAFTERS = {
  'chain': (drafters.uniform(gamma=3, vocab_size=V), 'speculative_sampling'),
  'tree': (
    toy_tree.drafter(toy_tree.BENT, is_sampled=False),
    toy_tree.rule('greedy_walk', toy_tree.BENT),
  ),
}


@every_network
@slow.parametrize('kind', DRAFTERS, now=['chain'])
def test_greedy_tokens_are_plain_ones(name, kind):
  """In float32, and those of a row that is alone."""
  model = families.language_model(packed(CONFIGS[name]))
  params, prompt = params_of(name), prompt_of(name)
  greedy = {'to_probs': decoders.GREEDY}
  plain = decoders.plain(model, Params(params), prompt, **greedy)
  drafter, rule = DRAFTERS[kind]
  own = toy.toy_params(V, seed=3) if kind == 'tree' else ()
  run = functools.partial(
    decoders.speculate, model, Params(params, own), drafter, rule=rule, **greedy
  )
  np.testing.assert_array_equal(run(prompt).tokens, plain.tokens)
  alone = run(jax.tree.map(lambda leaf: leaf[1:2], prompt))
  np.testing.assert_array_equal(alone.tokens[0], plain.tokens[1])


@pytest.mark.slow
def test_scales_move_with_their_entries():
  model = toy.compiled(families.language_model(packed(CONFIGS['T5'])))
  params = params_of('T5')
  cache = model.init(params, prompt_of('T5'), 24)
  tokens = jnp.asarray([[1, 2, 3]] * 4, jnp.int32)
  _, cache = model.extend(params, tokens, cache)
  # Rows take the place of others, encoder included.
  sources = jnp.asarray([-1, 0, 3, -1])
  found = refill.replace_rows(cache, cache, sources)
  for old, new in zip(*map(jax.tree.leaves, (cache, found)), strict=True):
    np.testing.assert_array_equal(new, old[jnp.asarray([0, 0, 3, 3])])
  # An accepted path moves.
  starts = jnp.asarray([2, 0, 1, 2], jnp.int32)
  offsets = jnp.asarray([[2]] * 4, jnp.int32)
  moved = model.gather(cache, starts, offsets, 3)
  for before, after in zip(cache.keys, moved.keys, strict=True):
    for row, start in enumerate(starts):
      np.testing.assert_array_equal(
        whole(after)[row, :, start], whole(before)[row, :, start + 2]
      )


@pytest.mark.slow
@pytest.mark.proof
def test_the_distribution_is_that_of_the_packed_cache(record_property):
  config = packed(toy.llama_config(4, num_layers=2))
  params = toy.llama_params(config, seed=1)
  result = trial.check(
    trial.Trial(
      target=families.language_model(config),
      params=Params(params, toy.perturb(params, seed=2, scale=0.3)),
      drafter=drafters.autoregressive(
        families.language_model(config),
        gamma=2,
        logits_to_probs=decoders.logits.standardize(temperature=1.0),
      ),
      verify_fn=verification.speculative_sampling,
      prompts=((0,), (0, 2), (2, 1, 0)),
      num_new=(4, 4, 3),
      eos_id=3,
    ),
    record_property,
    'Caches of integers through the compiled loop, false alarm rate 1e-9',
    'Llama with an int8 cache, drafted by a model with another',
    num_decodes=100_800,
  )
  accepted = np.sum(result.statistics.num_accepted)
  assert 0 < accepted < np.sum(result.statistics.num_tested)


TEXTS = ['the ab in', 'he the']


@pytest.fixture(scope='module')
def folder(tmp_path_factory) -> str:
  return tiny.write_model(tmp_path_factory.mktemp('packed') / 'model')


@pytest.mark.slow
def test_every_door_has_the_option(folder, capfd):
  load = functools.partial(specdec_jax.load, folder, cache_dtype='int8')
  plain, drafted = load(drafter='none'), load(drafter='quantized', gamma=2)
  assert plain.config.cache_dtype == jnp.int8
  texts = [
    [each.text for each in specdec_jax.generate(one, TEXTS, max_new_tokens=9)]
    for one in (plain, drafted)
  ]
  assert texts[0] == texts[1]
  result = tiny.run(
    capfd,
    *('generate', '--model', folder, '--cache_dtype', 'int8', '--json', '-'),
    *('--max_new_tokens', '9', '--prompt', TEXTS[0]),
  )
  assert (result.status, result.err) == (0, '')
  assert result.records()[0]['text'] == texts[0][0]


def test_what_cannot_be_is_refused(tmp_path):
  with pytest.raises(ValueError, match="expected 'int8'"):
    Model(checkpoint='smollm2-135m', cache_dtype='int4')

  @dataclasses.dataclass(frozen=True)
  class Other:
    vocab_size: int = 3

  with pytest.raises(ValueError, match='leave cache_dtype out'):
    models.read_config(Model(checkpoint='x', sizes=Other(), cache_dtype='int8'))


def test_a_model_is_written_without_it(tmp_path):
  """How one decodes is no size."""
  config = CONFIGS['Llama']
  safetensors_model.save(tmp_path, packed(config), params_of('Llama'))
  assert 'cache_dtype' not in (tmp_path / model_file.NAME).read_text()
  assert model_file.read(tmp_path) == config
