"""Speculation for encoder-decoders: a T5 that drafts for a T5, in ragged
batches, on one device and on meshes of eight."""

import functools

import jax
import numpy as np
import pytest

from specdec_jax import drafters, verification
from specdec_jax.assembly.drafters import one_by_one
from specdec_jax.assembly.drafters.choice import Target
from specdec_jax.assembly.lengths import Fixed
from specdec_jax.assembly.text_settings import TextSettings
from specdec_jax.base import Context, Params
from specdec_jax.decoding import autoregressive, speculative
from specdec_jax.decoding.method import Method
from specdec_jax.drafters.autoregressive import as_chain
from specdec_jax.sampling import logits
from specdec_jax.sharding import mesh as mesh_lib
from tests import slow, toy, toy_t5

# Sizes that eight devices divide.
V, MAX_LEN, EOS = 16, 20, 1
SIZES = {'num_heads': 8, 'embed_dim': 16, 'mlp_dim': 16}
CONFIG = toy_t5.config(V, num_layers=2, **SIZES)
DRAFTER_CONFIG = toy_t5.config(V, num_layers=1, **SIZES)
WAYS = {
  'greedy': (logits.standardize(temperature=0.0), verification.greedy),
  'sampled': (
    logits.standardize(temperature=0.8, top_p=0.95),
    verification.block_verification,
  ),
}


@functools.cache
def encoder_rows() -> list[list[int]]:
  """32 texts of 1 to 9 tokens, the last of each the end of text."""
  rng = np.random.default_rng(0)
  rows = [rng.integers(2, V, rng.integers(0, 9)).tolist() for _ in range(32)]
  return [row + [EOS] for row in rows]


def prompt_of(row_ids, encoder_width=None):
  rows = [encoder_rows()[i] for i in row_ids]
  return toy.prompt(
    # The first decoder token is T5's start token; some rows go on from there.
    [[0, 5, 7][: 1 + i % 3] for i in row_ids],
    width=3,
    row_ids=np.array(row_ids),
    max_lengths=[8 + i % 12 for i in row_ids],
    encoder_rows=rows,
    encoder_width=encoder_width or 9,
  )


@functools.cache
def weights() -> Params:
  target = toy_t5.params(CONFIG, seed=1, scale=2.5)
  layer_0 = {k: v for k, v in target['decoder'].items() if k != 'layers_1'}
  encoder = {k: v for k, v in target['encoder'].items() if k != 'layers_1'}
  drafter = target | {'decoder': layer_0, 'encoder': encoder}
  return Params(target, drafter)


@functools.cache
def generator(way: str):
  target = toy_t5.model(V, num_layers=2, **SIZES)
  to_probs, rule = WAYS[way]
  drafter = drafters.autoregressive(
    toy_t5.model(V, num_layers=1, **SIZES), gamma=3, logits_to_probs=to_probs
  )

  @jax.jit
  def generate(params, prompt):
    return speculative.generate(
      params,
      jax.random.key(3),
      prompt,
      method=Method(
        target=target,
        drafter=drafter,
        verify_fn=rule,
        logits_to_probs=to_probs,
        eos_id=EOS,
      ),
      max_len=MAX_LEN,
    )

  return generate


def decoded(output) -> list[list[int]]:
  tokens = np.asarray(output.tokens)
  return [
    row[:length].tolist()
    for row, length in zip(tokens, output.lengths, strict=True)
  ]


@functools.cache
def expected(way: str) -> list[list[int]]:
  output = generator(way)(weights(), prompt_of(range(32)))
  assert np.all(output.done)
  assert not np.any(output.has_nan)
  accepted, tested = (
    int(np.sum(getattr(output.statistics, name)))
    for name in ('num_accepted', 'num_tested')
  )
  assert 0.2 * tested < accepted < 0.98 * tested
  return decoded(output)


@slow.parametrize('way', WAYS, now=['sampled'])
def test_rows_do_not_know_their_batch(way):
  rows = expected(way)
  assert len({tuple(row) for row in rows}) > 25
  batches = {
    'greedy': [[9, 31, 0, 17, 2, 5, 23, 11]],
    'sampled': [[3], [30]],
  }
  for row_ids in batches[way]:
    output = generator(way)(weights(), prompt_of(row_ids))
    assert decoded(output) == [rows[i] for i in row_ids]


@pytest.mark.slow
def test_encoder_padding_does_not_matter():
  prompt = prompt_of(range(32), encoder_width=15)
  output = generator('sampled')(weights(), prompt)
  assert decoded(output) == expected('sampled')


def test_greedy_is_plain_greedy():
  to_probs, _ = WAYS['greedy']
  generate = functools.partial(
    autoregressive.generate,
    method=Method(
      target=toy_t5.model(V, num_layers=2, **SIZES),
      logits_to_probs=to_probs,
      eos_id=EOS,
    ),
    max_len=MAX_LEN,
  )
  prompt = prompt_of(range(32))
  plain = jax.jit(generate)(weights(), jax.random.key(0), prompt)
  assert decoded(plain) == expected('greedy')


@pytest.mark.slow
@pytest.mark.parametrize('num_unread', [1, 2, 3])
def test_lone_row_is_fed_what_its_cache_lacks(num_unread):
  model = toy.compiled(toy_t5.model(V, num_layers=1, **SIZES))
  params, rows = weights().drafter, {'encoder_rows': [[4, 2, EOS]]}
  prompt = toy.prompt([[0, 5, 7, 3, 9, 2]], **rows)
  tokens, lengths = prompt.decoder_tokens, prompt.decoder_lengths
  empty = model.init(params, toy.prompt([[0]], **rows), MAX_LEN)
  logits_of_all, _ = model.extend(params, tokens, empty)
  _, cache = model.extend(params, tokens[:, :-num_unread], empty)
  found, _, cache = jax.jit(as_chain(model).catch_up)(
    params, Context(tokens=tokens, lengths=lengths), cache
  )
  np.testing.assert_allclose(found, logits_of_all[:, -1], atol=1e-5)
  np.testing.assert_array_equal(cache.lengths, lengths)


def test_greedy_draft_looks_for_one_maximum():
  target = Target(
    name='', config=toy_t5.config(V), vocabulary=None, sampling=TextSettings()
  )
  made = one_by_one.drafter(toy.toy(V), target, Fixed(1))
  params, prompt = toy.toy_params(V, seed=1), toy.prompt([[1, 2]])
  context = Context(
    tokens=prompt.decoder_tokens, lengths=prompt.decoder_lengths
  )
  keys, cache = (
    jax.random.split(jax.random.key(0), 1),
    made.init(params, prompt, 4),
  )
  program = jax.make_jaxpr(made.propose)(params, keys, context, cache)
  # In the loop over further tokens, and of the last one.
  assert str(program).count('reduce_max') == 2


@pytest.mark.slow
@pytest.mark.parametrize(
  ('way', 'num_partitions'),
  [('greedy', 2), ('sampled', 2), ('sampled', 4), ('sampled', 8)],
)
def test_every_mesh_gives_the_same_tokens(way, num_partitions):
  mesh = mesh_lib.make(num_partitions=num_partitions)
  assert dict(mesh.shape) == {
    'data': 8 // num_partitions,
    'model': num_partitions,
  }
  prompt = prompt_of(range(32))
  mesh_lib.check_divides(mesh, weights(), batch_size=32)
  shardings = mesh_lib.parameter_shardings(mesh, weights())
  params = jax.device_put(weights(), shardings)
  kernel = params.target['decoder']['layers_0']['mlp']['wo']['kernel']
  assert kernel.addressable_shards[0].data.shape == (16 // num_partitions, 16)
  with jax.set_mesh(mesh):
    prompt = jax.device_put(prompt, mesh_lib.batch_sharding(mesh))
    output = generator(way)(params, prompt)
  assert decoded(output) == expected(way)
