"""Block drafters in training: blocks in one pass, the loss, and learning."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from specdec_jax import drafters
from specdec_jax.base import Params, Prompt
from specdec_jax.checkpoints import huggingface, loading, safetensors_model
from specdec_jax.decoding import speculative
from specdec_jax.decoding.method import Method
from specdec_jax.models import families
from specdec_jax.models.drafting.block_drafter import BlockDrafter, with_mask
from specdec_jax.models.layers import applied
from specdec_jax.training import block, block_start, block_states, eagle
from tests import decoders, toy, toy_blocks, toy_families, toy_t5

V, LENGTH = 12, 8
T5 = toy_t5.config(V, num_layers=2)
LLAMA = toy.llama_config(V, num_layers=2)
TARGETS = {
  'T5': (T5, toy_t5.params(T5, seed=1), {}),
  'Llama': (LLAMA, toy.llama_params(LLAMA, seed=1), {}),
  'Llama, causal, windows': (
    LLAMA,
    toy.llama_params(LLAMA, seed=1),
    {'is_causal': True, 'windows': (2, 0), 'markov_head': 'rnn'},
  ),
  "Llama, in DFlash's convention": (
    LLAMA,
    toy.llama_params(LLAMA, seed=1),
    {
      'sample_from_anchor': False,
      'mask_token_id': 5,
      'windows': (0, 2),
      'has_causal_windows': True,
    },
  ),
  'Llama, windows from the anchor': (
    LLAMA,
    toy.llama_params(LLAMA, seed=1),
    {'windows': (2,), 'window_from_anchor': True},
  ),
}


def batch_of(target, num_rows: int = 3):
  """Rows of texts of several lengths, as `batches.from_length_buckets` has
  them."""
  rng = np.random.default_rng(0)
  tokens = rng.integers(2, V, (num_rows, LENGTH))
  counts = np.arange(LENGTH) < np.array([[LENGTH, 5, 3]]).T[:num_rows]
  tokens = tokens * counts
  batch = {
    'decoder_target_tokens': tokens,
    'decoder_input_tokens': np.pad(tokens, ((0, 0), (1, 0)))[:, :-1],
    'decoder_loss_weights': counts.astype(np.float32),
  }
  if families.has_encoder(target):
    source = rng.integers(2, V, (num_rows, 5))
    source[1, 3:] = 0
    batch['encoder_input_tokens'] = source
  as_array = lambda x: jnp.asarray(
    x, jnp.float32 if x.dtype == np.float32 else jnp.int32
  )
  return {name: as_array(x) for name, x in batch.items()}


@pytest.mark.parametrize('name', TARGETS)
def test_all_blocks_in_one_pass_are_those_of_decoding(name):
  """One by one, after the prefill of the text up to each anchor."""
  target, target_params, sizes = TARGETS[name]
  config = toy_blocks.config(target, **sizes)
  own = toy_blocks.params(config, seed=2)
  batch = batch_of(target)
  anchors = jnp.asarray([[0, 3, 6], [2, 0, 4], [1, 2, 0]], jnp.int32)
  network = families.network(target)
  embedding = network.token_embedder(target_params)

  @jax.jit
  def together(own):
    states = block_states.target_states(
      network, target_params, config, own['target_ids'], batch
    )
    tokens = batch['decoder_input_tokens']
    params = with_mask(config, own, embedding)
    return block.hidden_of_blocks(
      config, params, embedding, tokens, anchors, states
    )

  bound = families.bind(target, config, width=2)
  params = bound.join(target_params, own)

  @functools.partial(jax.jit, static_argnums=2)
  def alone(tokens, source, length):
    prompt = Prompt(
      encoder_tokens=source,
      decoder_tokens=tokens[:, : length + 1],
      decoder_lengths=jnp.full(1, length + 1, jnp.int32),
      row_ids=jnp.zeros(1, jnp.int32),
    )
    read = bound.target.init(target_params, prompt, LENGTH)
    cache = bound.model.init(params, 1, LENGTH)
    if length:
      cache = bound.model.read(params, read.prompt, cache)
    anchor = tokens[:, length]
    return bound.model.fill(params, anchor, cache, read.target).hidden

  found = together(own)
  for row, i in itertools.product(range(3), range(3)):
    span = slice(row, row + 1)
    source = batch.get('encoder_input_tokens')
    expected = alone(
      batch['decoder_input_tokens'][span],
      None if source is None else source[span],
      int(anchors[row, i]),
    )
    np.testing.assert_allclose(found[row, i], expected[0], rtol=1e-4, atol=1e-5)


def method_of(config, sizes, network_of=drafters.block, **options):
  target, network = toy_families.networks(config, sizes, gamma=3)
  drafter = drafters.autoregressive(network_of(network), gamma=3, **options)
  return Method(
    target=target,
    drafter=drafter,
    logits_to_probs=options['logits_to_probs'],
    eos_id=-1,
  )


def late(network):
  """Broken: each position is read with the features of the one before it."""

  def read(params, features, cache):
    shifted = jnp.pad(features[:, :-1], ((0, 0), (1, 0), (0, 0)))
    return network.read(params, shifted, cache)

  return drafters.block(network._replace(read=read))


@pytest.mark.parametrize('name', toy_blocks.TARGETS)
@pytest.mark.parametrize('is_late', [False, True])
def test_blocks_in_the_loop_read_true_features(name, is_late):
  """After any number of accepted tokens, they are those of training, which
  reads each text once."""
  config, target_params, sizes, prompt = toy_blocks.case(name)
  own = toy_blocks.params(sizes, seed=2)
  params = toy_blocks.joined(config, sizes, target_params, own)
  both = Params(target_params, params)
  method = method_of(
    config,
    sizes,
    late if is_late else drafters.block,
    logits_to_probs=decoders.SAMPLED,
  )
  state = jax.jit(
    functools.partial(speculative.init, method=method, max_len=20)
  )(both, jax.random.key(0), prompt)
  step = jax.jit(functools.partial(speculative.step, method=method))
  network = families.network(config)
  embedding = network.token_embedder(target_params)

  @jax.jit
  def expected(context):
    batch = {'decoder_input_tokens': context.tokens}
    if prompt.encoder_tokens is not None:
      batch['encoder_input_tokens'] = prompt.encoder_tokens
    states = block_states.target_states(
      network, target_params, sizes, own['target_ids'], batch
    )
    anchors = (context.lengths - 1)[:, None]
    return block.hidden_of_blocks(
      sizes, own, embedding, context.tokens, anchors, states
    )[:, 0]

  gaps, counts = [], set()
  for _ in range(5):
    before = state.context
    state, info = step(both, state)
    found = state.drafter_state.hidden
    gaps.append(float(jnp.abs(found - expected(before)).max()))
    counts |= set(info.counts.tolist())
  assert len(counts) > 1
  assert max(gaps) > 1e-2 if is_late else max(gaps) < 1e-4


@pytest.mark.parametrize('weights', block.POSITION_WEIGHTS)
def test_weights_of_slots(weights):
  """D-PACE is the gradient of the expected number of accepted tokens."""
  q = jnp.asarray([[0.9, 0.2, 0.6, 0.5], [0.3, 0.8, 0.1, 0.7]])
  counted = jnp.asarray([[1.0, 1, 1, 1], [1, 1, 0, 0]])
  found = block.position_weights(
    jnp.log(q), counted, name=weights, decay=2.0, smoothing=0.5
  )
  if weights == 'exponential':
    expected = np.exp(-np.arange(4) / 2)[None] * counted
  else:
    # Of the logarithm of the smoothed probability, hence at 0.
    def expected_length(logs):
      smooth = jnp.exp(logs) * (0.5 * q + 0.5)
      reached = jnp.cumprod(jnp.where(counted > 0, smooth, 1.0), axis=-1)
      return (reached * counted).sum()

    expected = jax.grad(expected_length)(jnp.zeros_like(q))
  np.testing.assert_allclose(found, expected, rtol=1e-5)


def stored(folder, target, params) -> str:
  path = folder / 'target'
  safetensors_model.save(path, target, params)
  return str(path)


@pytest.mark.parametrize('head', ['vanilla', 'gated', 'rnn'])
def test_the_loss_is_that_of_its_slots(tmp_path, head):
  """Each given the true token before it, and what the target says there."""
  config = toy_blocks.config(T5, markov_head=head)
  target_params = toy_t5.params(T5, seed=1)
  own = toy_blocks.params(config, seed=2)
  batch = batch_of(T5)
  path = stored(tmp_path, T5, target_params)
  loss_fn = block.block_loss(config, target=path, num_anchors=4, decay=2.0)
  sums = jax.jit(lambda own: loss_fn(own, batch, None))(own)
  counts = np.asarray(batch['decoder_loss_weights'])
  anchors = block.random_anchors(None, batch['decoder_loss_weights'], 4)
  network = families.network(T5)
  states = block_states.target_states(
    network, target_params, config, own['target_ids'], batch
  )
  tokens = batch['decoder_input_tokens']
  hidden = block.hidden_of_blocks(
    config,
    own,
    network.token_embedder(target_params),
    tokens,
    anchors,
    states,
  )
  bound = families.bind(T5, config, width=4)
  params = bound.join(target_params, own)
  logits = applied(BlockDrafter(config))(
    params['block'], hidden, method=BlockDrafter.project
  )
  loss, alphas, total = 0.0, np.zeros(3), np.zeros(3)
  for row, i in itertools.product(range(3), range(4)):
    anchor = int(anchors[row, i])
    state = jnp.zeros((config.state_size,))
    for slot in range(3):
      place = anchor + slot
      if place >= LENGTH or not counts[row, anchor] or not counts[row, place]:
        break
      bias, state = applied(BlockDrafter(config))(
        params['block'],
        tokens[row, place],
        hidden[row, i, slot],
        state,
        method=BlockDrafter.bias,
      )
      log_p = states.log_probs[row, place]
      of_slot, _, alpha = eagle.lk_loss(log_p, logits[row, i, slot] + bias)
      guess = applied(BlockDrafter(config))(
        params['block'],
        tokens[row, place],
        hidden[row, i, slot],
        method=BlockDrafter.confidence,
      )
      chance = 1 / (1 + np.exp(-guess))
      nats = -(alpha * np.log(chance) + (1 - alpha) * np.log(1 - chance))
      loss += np.exp(-slot / 2.0) * float(of_slot + nats)
      alphas[slot] += float(alpha)
      total[slot] += 1
  assert total[0] == 4 + 4 + 3 > total[2] > 0
  np.testing.assert_allclose(sums.loss, loss, rtol=1e-4)
  for i in range(3):
    np.testing.assert_allclose(
      sums.figures[f'alpha_{i + 1}'], [alphas[i], total[i]], rtol=1e-4
    )


def test_texts_with_their_streams_need_no_target(tmp_path):
  """Packed, as `written_texts` have them: the loss is that of the same texts,
  one in each row, which the target reads."""
  params = toy.llama_params(LLAMA, seed=1)
  config = toy_blocks.config(LLAMA, feature_layers=(1,))
  own = toy_blocks.params(config, seed=2)
  # Texts of 8 and 5 tokens, whose first is the prompt, and one of 3.
  rng = np.random.default_rng(3)
  lengths = np.array([8, 5, 3])
  texts = rng.integers(2, V, (3, 8))
  places = np.arange(8)[None]
  rows = {
    'decoder_input_tokens': texts,
    'decoder_target_tokens': np.roll(texts, -1, axis=1),
    'decoder_loss_weights': np.float32(places < lengths[:, None] - 1),
  }
  rows = {
    name: jnp.asarray(x, 'float32' if x.dtype == np.float32 else 'int32')
    for name, x in rows.items()
  }
  network = families.network(LLAMA)
  with_output = toy_blocks.config(LLAMA, feature_layers=(1, 2))
  everything = jnp.arange(V)
  states = block_states.target_states(
    network, params, with_output, everything, rows
  )
  # The same texts in two rows: of 8 tokens, and of 5 and 3.
  pack = lambda x: jnp.stack([x[0], jnp.concatenate([x[1, :5], x[2, :3]])])
  next_tokens = rows['decoder_target_tokens'][..., None]
  of_next = jnp.take_along_axis(states.log_probs, next_tokens, axis=-1)[..., 0]
  log_probs = jnp.pad(of_next, ((0, 0), (1, 0)))[:, :-1]
  written = {
    'decoder_target_tokens': pack(rows['decoder_input_tokens']),
    'decoder_segment_ids': jnp.asarray([[1] * 8, [1] * 5 + [2] * 3]),
    'decoder_loss_weights': pack(
      jnp.asarray(np.float32(np.tile(places > 0, (3, 1))))
    ),
    'log_probs': pack(log_probs),
    'streams': pack(states.features),
  }
  path = stored(tmp_path, LLAMA, params)
  loss_fn = block.block_loss(config, target=path, num_anchors=8)
  sums_of = jax.jit(lambda batch: loss_fn(own, batch, None))
  found, expected = sums_of(written), sums_of(rows)
  assert float(expected.weight) == 18 + 9 + 3 == float(found.weight)
  for name in ('loss', 'nats', 'num_correct'):
    np.testing.assert_allclose(
      getattr(found, name), getattr(expected, name), rtol=1e-4
    )


def test_it_learns_a_text_by_heart(tmp_path):
  """All slots, from what the target knows and the token before."""
  target_params = toy_t5.params(T5, seed=1)
  path = stored(tmp_path, T5, target_params)
  config = block_start.block_config(
    target=path, num_layers=1, block_size=3, draft_vocab_size=V, markov_rank=4
  )
  params = block_start.initial_params(
    config, jax.random.key(0), T5, target_params, jnp.arange(V)
  )
  batch = batch_of(T5)
  loss_fn = block.block_loss(config, target=path, weights='dpace')
  optimizer = optax.adam(0.02)
  fixed = {'target_ids': params.pop('target_ids')}

  @jax.jit
  def step(params, state, key):
    def loss_of(params):
      sums = loss_fn(params | fixed, batch, key)
      return sums.loss / sums.weight, sums

    grads, sums = jax.grad(loss_of, has_aux=True)(params)
    # optax raises a float to an integer power.
    with jax.numpy_dtype_promotion('standard'):
      updates, state = optimizer.update(grads, state)
    return optax.apply_updates(params, updates), state, sums

  state, losses = optimizer.init(params), []
  for i in range(60):
    params, state, sums = step(params, state, jax.random.key(i))
    losses.append(float(sums.nats / sums.weight))
  assert losses[-1] < 0.1 * losses[0]
  assert sums.means()['alpha_3'] > 0.8


def test_a_drafter_that_speculators_reads_can_be_begun(tmp_path):
  """With norms of queries and keys that the target lacks, and a token as the
  mask."""
  target_params = toy.llama_params(LLAMA, seed=1)
  safetensors_model.save(tmp_path / 'target', LLAMA, target_params)
  config = block_start.block_config(
    target=str(tmp_path / 'target'),
    feature_norms=False,
    mask_token_id=3,
    has_qk_norm=True,
  )
  params = block_start.initial_params(
    config, jax.random.key(0), LLAMA, target_params, jnp.arange(V)
  )
  shapes = families.param_shapes(config)
  assert jax.tree.map(jnp.shape, params) == jax.tree.map(jnp.shape, shapes)
  huggingface.save(tmp_path / 'theirs', config, params)
  loaded, _ = loading.read(tmp_path / 'theirs')
  assert loaded.mask_token_id == 3
