"""The Spec-Drafter's network against its description, and what the compiler
makes of the loop around it."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specdec_jax import drafters, verification
from specdec_jax.base import Context, Params
from specdec_jax.decoding import speculative
from specdec_jax.decoding.method import Method
from specdec_jax.models import families, presets
from specdec_jax.models.drafting import block_decoder
from specdec_jax.models.drafting.block_decoder import BlockDecoder
from specdec_jax.models.t5 import Encoder
from specdec_jax.sampling import logits
from tests import toy, toy_block, toy_t5
from tests.decoding import test_compilation

V, WIDTH = 12, 3
CONFIG = toy_block.config(V)
SOURCE = np.array([[5, 6, 7, 1, 0], [9, 1, 0, 0, 0]], np.int32)
TEXT = np.array([[4, 8, 2, 3, 0, 0, 0, 0], [0] * 8], np.int32)
STARTS = np.array([4, 0], np.int32)
KNOWN = np.arange(8) < STARTS[:, None]


@functools.cache
def weights():
  return toy_block.params(CONFIG, seed=0)


@jax.jit
def filled(params, text, known, starts):
  return BlockDecoder(CONFIG).apply(
    {'params': params}, SOURCE, text, known, starts, width=WIDTH
  )


@jax.jit
def encoded(params, source):
  """One sentence without padding, `[E, embed]`."""
  x = jnp.take(params['token_embedder']['embedding'], source, axis=0)[None]
  mask = jnp.ones((1, source.size, source.size), jnp.bool_)
  encoder = Encoder(block_decoder.encoder_config(CONFIG))
  return encoder.apply({'params': params['encoder']}, x, mask)[0]


def _softmax(x):
  x = np.exp(x - x.max(-1, keepdims=True))
  return x / x.sum(-1, keepdims=True)


def _norm(x, params):
  mean = x.mean(-1, keepdims=True)
  x = (x - mean) / np.sqrt(((x - mean) ** 2).mean(-1, keepdims=True) + 1e-6)
  return x * params['scale'] + params['bias']


def _attend(queries, keys, params, num_heads=2):
  """`[T, embed]` and `[S, embed]`, all of S in sight."""
  split = lambda x, name: np.split(
    x @ params[name]['kernel'], num_heads, axis=-1
  )
  heads = zip(
    split(queries, 'query'), split(keys, 'key'), split(keys, 'value'),
    strict=True,
  )  # fmt: skip
  mixed = [_softmax(q @ k.T) @ v for q, k, v in heads]
  return np.concatenate(mixed, axis=-1) @ params['out']['kernel']


def _described(params, source, prefix, encoded):
  """Logits of a block after a prefix, as the paper describes the network: no
  padding, no batch, every layer at every position."""
  table = params['token_embedder']['embedding']
  length = len(prefix) + WIDTH
  positions = params['decoder_positions']['embedding'][:length]
  embedded = table[source]
  asked = positions @ params['copy_query']['kernel']
  offered = embedded + params['encoder_positions']['embedding'][: len(source)]
  copies = _softmax(asked @ offered.T / np.sqrt(8)) @ embedded
  x = np.concatenate([table[prefix], copies[len(prefix) :]])
  for i in range(CONFIG.num_decoder_layers):
    layer = params[f'layers_{i}']
    x = x + positions
    h = _attend(x, x, layer['self_attention'])
    x = _norm(x + h, layer['self_attention_layer_norm'])
    h = _attend(x, encoded, layer['encoder_decoder_attention'])
    x = _norm(x + h, layer['cross_attention_layer_norm'])
    inner = np.asarray(jax.nn.gelu(x @ layer['mlp']['wi']['kernel']))
    h = inner @ layer['mlp']['wo']['kernel']
    x = _norm(x + h, layer['mlp_layer_norm'])
  return x[len(prefix) :] @ table.T / np.sqrt(8)


def test_network_is_the_described_one():
  params = weights()
  made = filled(params, TEXT, KNOWN, STARTS)
  host = jax.tree.map(np.asarray, params)
  for row, (source_len, start) in enumerate([(4, 4), (2, 0)]):
    source = SOURCE[row, :source_len]
    states = np.asarray(encoded(params, source))
    expected = _described(host, source, TEXT[row, :start], states)
    np.testing.assert_allclose(made[row], expected, atol=2e-5)


def test_a_mask_sees_the_masks_after_it():
  """A revealed token changes what the masks before it say: the decoder looks in
  both directions."""
  text, known = TEXT.copy(), KNOWN.copy()
  text[0, 6], known[0, 6] = 9, True
  before = filled(weights(), TEXT, KNOWN, STARTS)
  after = filled(weights(), text, known, STARTS)
  assert np.abs(after[0, 0] - before[0, 0]).max() > 1e-3
  np.testing.assert_allclose(after[1], before[1], atol=1e-6)


@pytest.mark.parametrize('max_positions', [4, 10])
def test_too_few_positions_are_an_error(max_positions):
  config = toy_block.config(V, max_positions=max_positions)
  drafter = drafters.spec_drafter(block_decoder.block_model(config), gamma=3)
  with pytest.raises(ValueError, match='positions'):
    speculate(drafter, toy_block.params(config, seed=0))


def speculate(drafter, drafter_params):
  return jax.eval_shape(
    lambda params, prompt: speculative.generate(
      params,
      jax.random.key(0),
      prompt,
      method=Method(
        target=toy_t5.model(V),
        drafter=drafter,
        verify_fn=verification.greedy,
        logits_to_probs=logits.standardize(),
        eos_id=1,
      ),
      max_len=12,
    ),
    Params(toy_t5.params(toy_t5.config(V), seed=0), drafter_params),
    toy.prompt([[0]], encoder_rows=[[3, 4, 5, 6, 1]]),
  )


def test_padding_of_the_vocabulary_is_never_drafted():
  prompt = toy.prompt([[0]] * 2, encoder_rows=[[5, 6, 1], [7, 1]])
  context = Context(
    tokens=jnp.zeros((2, 12), jnp.int32), lengths=jnp.ones(2, jnp.int32)
  )

  def draft(vocab_size):
    drafter = drafters.spec_drafter(
      block_decoder.block_model(CONFIG), gamma=3, vocab_size=vocab_size
    )

    @jax.jit
    def propose(params):
      state = drafter.init(params, prompt, 12)
      return drafter.propose(params, None, context, state)[0].tokens

    return propose(weights())

  assert (draft(None) >= 4).any()
  assert (draft(4) < 4).all()


def test_named_sizes_fit_their_targets():
  """Embeddings and the encoder of the target have the drafter's shapes."""

  pairs = {
    'xia_6_6': 't5_1_0_small',
    'mini_4_1': 't5_mini',
    'mini_2_1': 't5_mini',
  }
  for name, target in pairs.items():
    ours = families.param_shapes(presets.spec_drafter(name))
    theirs = families.param_shapes(presets.preset(target))
    assert ours['token_embedder'] == theirs['token_embedder']
    # A shallower encoder has the first of the target's layers.
    assert ours['encoder'].items() <= theirs['encoder'].items()
  with pytest.raises(ValueError, match="unknown preset 'huge'"):
    presets.spec_drafter('huge')


@pytest.mark.optimized
@pytest.mark.parametrize('batch_size', [1, 2])
def test_no_cache_is_copied_in_the_loop(batch_size):
  """Of the target's cache and of what the drafter keeps of the source."""
  max_len, source_len = 30, 400
  config = toy_t5.config(V, embed_dim=32, num_heads=4, head_dim=32)
  block_config = toy_block.config(V, head_dim=8, max_positions=source_len)
  method = Method(
    target=families.language_model(config),
    drafter=drafters.spec_drafter(
      block_decoder.block_model(block_config), gamma=3
    ),
    verify_fn=verification.greedy,
    logits_to_probs=logits.standardize(),
    eos_id=1,
  )
  params = Params(
    toy_t5.params(config, seed=0),
    toy_block.params(block_config, seed=0),
  )
  state = jax.eval_shape(
    lambda params, prompt: speculative.init(
      params, jax.random.key(0), prompt, method=method, max_len=max_len
    ),
    params,
    toy.prompt(
      [[0]] * batch_size, encoder_rows=[[3, 1]] * batch_size,
      encoder_width=source_len,
    ),
  )  # fmt: skip
  run = functools.partial(speculative.run, method=method)
  hlo = test_compilation.optimized_hlo(jax.jit(run), params, state)
  lines = test_compilation.in_loops(hlo)
  assert sum('dynamic-update-slice' in line for line in lines) >= 2
  # Heads x positions x size of a head, of either side.
  cache = 4 * (max_len + 4) * 32
  source = 2 * source_len * 8
  smallest = batch_size * min(cache, source)
  assert test_compilation.cache_copies(lines, smallest) == []
  for word in ('callback', 'outfeed', 'infeed'):
    assert word not in hlo
