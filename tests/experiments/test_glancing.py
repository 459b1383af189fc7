"""What a Spec-Drafter learns from: prefixes, masks, and what is given away."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments.xia2023 import glancing
from specdec_jax.models.drafting.block_decoder import BlockDecoder
from specdec_jax.training import loop, losses, run_checkpoints
from specdec_jax.training.data.datasets import Dataset
from tests import toy_block, toy_t5

V, GAMMA, ROWS, T = 12, 4, 16, 7
CONFIG = toy_block.config(
  V, num_encoder_layers=1, num_decoder_layers=1, dropout_rate=0.2
)


@functools.cache
def batch():
  rng = np.random.default_rng(0)
  lengths = np.array([1, 7, *rng.integers(1, T + 1, ROWS - 2)])
  is_text = np.arange(T) < lengths[:, None]
  targets = np.where(is_text, rng.integers(2, V, (ROWS, T)), 0)
  return {
    'encoder_input_tokens': jnp.asarray(
      rng.integers(2, V, (ROWS, 5)), jnp.int32
    ),
    'decoder_target_tokens': jnp.asarray(targets, jnp.int32),
    'decoder_loss_weights': jnp.asarray(is_text, jnp.float32),
    glancing.RATIO: jnp.full(ROWS, 0.5, jnp.float32),
  }


@functools.cache
def weights():
  return toy_block.params(CONFIG, seed=0)


class Spy:
  """Records what the network is asked and answers, pass by pass."""

  def __init__(self, monkeypatch):
    self.passes = []
    hidden = BlockDecoder.hidden

    def recording(network, text, is_known, starts, *rest, **options):
      made = hidden(network, text, is_known, starts, *rest, **options)
      by_block = lambda x: x.reshape(starts.size, *x.shape[2:])
      logits = network.project(by_block(made))
      self.passes.append((by_block(is_known), by_block(starts), logits))
      return made

    monkeypatch.setattr(BlockDecoder, 'hidden', recording)


def run(monkeypatch, features=None, key=1, config=CONFIG, **options):
  """The sums of the loss, and the passes that made them."""
  spy = Spy(monkeypatch)

  def traced(params, features):
    spy.passes.clear()
    loss_fn = glancing.block_loss(config, gamma=GAMMA, **options)
    key_array = None if key is None else jax.random.key(key)
    return loss_fn(params, features, key_array), list(spy.passes)

  sums, passes = jax.jit(traced)(weights(), features or batch())
  return sums, [[np.asarray(x) for x in each] for each in passes]


@pytest.mark.parametrize('ratio', [0.0, 0.3, 0.41, 0.5, 1.0])
def test_revealed_count_is_the_papers(ratio):
  rng = np.random.default_rng(1)
  is_masked = rng.random((400, 25)) < rng.random((400, 1))
  is_correct = rng.random((400, 25)) < 0.4
  made = jax.jit(glancing.reveal)(
    jax.random.key(0), is_masked, is_correct, np.full(400, ratio, np.float32)
  )
  made = np.asarray(made)
  for row in range(400):
    masked = is_masked[row].sum()
    correct = (is_masked[row] & is_correct[row]).sum()
    expected = int(np.float32(masked - correct) * np.float32(ratio) // 1)
    assert made[row].sum() == expected
  assert not (made & ~is_masked).any()
  # Drawn among all masks, right or wrong, and not always the same ones.
  if ratio == 0.5:
    assert (made & is_correct).any()
    shares = made.sum(0) / np.maximum(is_masked.sum(0), 1)
    assert shares.std() < 0.06


def test_prefixes_are_uniform_below_the_length():
  lengths = np.repeat([0, 1, 5], 5000).astype(np.int32)
  starts = np.asarray(
    jax.jit(glancing.draw_prefixes)(jax.random.key(0), lengths)
  )
  assert (starts[:10_000] == 0).all()
  counts = np.bincount(starts[10_000:], minlength=5)
  assert counts.size == 5
  np.testing.assert_allclose(counts, 1000, atol=5 * np.sqrt(800))


@pytest.mark.slow
def test_several_blocks_of_a_text_are_several_rows(monkeypatch):
  config = dataclasses.replace(CONFIG, dropout_rate=0.0)
  options = {'config': config, 'is_glancing': False}
  one, _ = run(monkeypatch, has_random_prefix=False, **options)
  three, _ = run(monkeypatch, has_random_prefix=False, num_blocks=3, **options)
  jax.tree.map(
    lambda a, b: np.testing.assert_allclose(b, 3 * a, rtol=1e-5), one, three
  )
  _, [(_, starts, logits)] = run(monkeypatch, num_blocks=3, **options)
  assert logits.shape == (3 * ROWS, GAMMA, V)
  lengths = np.asarray(batch()['decoder_loss_weights']).sum(1)
  starts = starts.reshape(ROWS, 3)
  assert (starts < lengths[:, None]).all()
  assert len({len(set(row)) for row in starts.tolist()}) > 1
  # Validation is always of one block.
  _, [(_, starts, _)] = run(monkeypatch, key=None, num_blocks=3, **options)
  assert starts.shape == (ROWS,)


@pytest.mark.slow
def test_loss_counts_masks_that_have_a_target_and_stay_masked(monkeypatch):
  sums, (first, second) = run(monkeypatch, decay=0.5)
  lengths = np.asarray(batch()['decoder_loss_weights']).sum(1).astype(int)
  gold = np.pad(batch()['decoder_target_tokens'], ((0, 0), (0, GAMMA)))
  known_before, starts, guess = first
  known, _, logits = second
  assert (starts < lengths).all()
  assert len(set(starts.tolist())) > 2
  counted, nats, revealed = 0, 0.0, 0
  for row in range(ROWS):
    start, end = starts[row], min(starts[row] + GAMMA, lengths[row])
    np.testing.assert_array_equal(
      known_before[row], np.arange(T + GAMMA) < start
    )
    given = known[row] & ~known_before[row]
    assert not given[:start].any()
    assert not given[end:].any()
    correct = guess[row, : end - start].argmax(-1) == gold[row, start:end]
    assert given.sum() == (end - start - correct.sum()) // 2
    revealed += given.sum()
    for position in range(start, end):
      if not given[position]:
        log_probs = jax.nn.log_softmax(logits[row, position - start])
        weight = 0.5 ** (position - start)
        nats -= weight * float(log_probs[gold[row, position]])
        counted += weight
  assert revealed > 5
  assert float(sums.weight) == counted
  np.testing.assert_allclose(sums.nats, nats, rtol=1e-5)
  assert float(sums.loss) != pytest.approx(nats)  # Labels are smoothed.


@pytest.mark.slow
@pytest.mark.parametrize(
  ('count', 'depth', 'rate'),
  [(1, 1, 0.2), (3, 1, 0.0), (3, 2, 0.0)],
)
def test_loss_is_that_of_every_block_by_itself(monkeypatch, count, depth, rate):
  """The loss and its gradient are those of the second pass alone, over rows of
  a text and a block each, with what was revealed held fixed."""
  config = dataclasses.replace(
    CONFIG, num_decoder_layers=depth, dropout_rate=rate
  )
  params = toy_block.params(config, seed=0)
  monkeypatch.setitem(globals(), 'weights', lambda: params)
  options = {'num_blocks': count}
  _, (_, second) = run(monkeypatch, config=config, **options)
  known, starts, _ = second
  rows = {name: jnp.repeat(x, count, 0) for name, x in batch().items()}
  gold = np.pad(rows['decoder_target_tokens'], ((0, 0), (0, GAMMA)))
  block = starts[:, None] + np.arange(GAMMA)
  lengths = np.asarray(rows['decoder_loss_weights']).sum(1)
  is_left = (block < lengths[:, None]) & ~np.take_along_axis(known, block, 1)
  dropout_key = jax.random.split(jax.random.key(1), 4)[2]

  def second_pass_alone(params):
    args = (rows['encoder_input_tokens'], T + GAMMA)
    key = dropout_key if rate else None
    apply = functools.partial(glancing.apply_network, config, params, key)
    memory = apply(*args, method=BlockDecoder.encode)
    args = gold, known[:, None], starts[:, None], memory
    x = apply(*args, width=GAMMA, method=BlockDecoder.hidden)
    logits = apply(x[:, 0], method=BlockDecoder.project)
    return losses.cross_entropy(
      logits,
      np.take_along_axis(gold, block, 1),
      is_left.astype(np.float32),
      label_smoothing=0.1,
    ).loss

  loss_fn = glancing.block_loss(config, gamma=GAMMA, **options)
  both_passes = lambda p: loss_fn(p, batch(), jax.random.key(1)).loss
  both, alone = (
    jax.jit(jax.value_and_grad(f))(params)
    for f in (both_passes, second_pass_alone)
  )
  for ours, theirs in zip(
    jax.tree.leaves(both), jax.tree.leaves(alone), strict=True
  ):
    # Both sum in float32, so that errors grow with the largest terms.
    largest = np.abs(theirs).max()
    assert largest > 0
    np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-5 * largest)


@pytest.mark.slow
@pytest.mark.parametrize('shares', [True, False])
def test_both_passes_drop_out_alike_if_they_share(monkeypatch, shares):
  """Nothing is revealed at ratio 0, so only dropout can tell them apart."""
  features = batch() | {glancing.RATIO: jnp.zeros(ROWS, jnp.float32)}
  _, passes = run(monkeypatch, features, shares_dropout=shares)
  first, second = (logits for _, _, logits in passes)
  assert np.allclose(first, second, atol=1e-6) == shares


def test_flags_leave_parts_out(monkeypatch):
  sums, passes = run(
    monkeypatch, is_glancing=False, has_random_prefix=False, label_smoothing=0.0
  )
  assert len(passes) == 1
  assert (passes[0][1] == 0).all()
  lengths = np.asarray(batch()['decoder_loss_weights']).sum(1)
  assert float(sums.weight) == np.minimum(lengths, GAMMA).sum()
  np.testing.assert_allclose(sums.loss, sums.nats, rtol=1e-6)


def test_validation_draws_nothing(monkeypatch):
  first, passes = run(monkeypatch, key=None)
  second, _ = run(monkeypatch, key=None)
  assert len(passes) == 1
  assert float(first.nats) == float(second.nats)


def _packed(position, segments=1):
  return {
    'decoder_segment_ids': np.full((2, 3), segments, np.int32),
    'decoder_target_tokens': np.zeros((2, 3), np.int32),
  }


def test_ratio_falls_in_a_straight_line():
  dataset = glancing.with_ratio(Dataset(_packed), train_steps=101)
  ratios = [
    float(dataset.batch(position)[glancing.RATIO][0])
    for position in (0, 25, 50, 100, 500)
  ]
  np.testing.assert_allclose(ratios, [0.5, 0.45, 0.4, 0.3, 0.3], rtol=1e-6)


def test_packed_rows_and_bad_ratios_are_refused():
  packed = Dataset(functools.partial(_packed, segments=2))
  with pytest.raises(ValueError, match='2 examples'):
    glancing.with_ratio(packed, train_steps=2).batch(0)
  with pytest.raises(ValueError, match='must lie in'):
    glancing.with_ratio(Dataset(_packed), first=1.5, train_steps=2)


@pytest.mark.slow
def test_encoder_begins_as_the_targets():
  config = toy_block.config(V)
  target = toy_t5.params(toy_t5.config(V), seed=3)
  init = jax.jit(functools.partial(glancing.init_params, config))
  params = init(jax.random.key(0), target)
  other = init(jax.random.key(1), target)
  same = lambda a, b: all(
    jax.tree.leaves(jax.tree.map(lambda x, y: bool((x == y).all()), a, b))
  )
  assert same(params['token_embedder'], target['token_embedder'])
  assert same(params['encoder']['layers_0'], target['encoder']['layers_0'])
  # The drafter has one layer more than this target: it is drawn, like the rest.
  assert not same(params['encoder']['layers_1'], other['encoder']['layers_1'])
  assert not same(params['layers_0'], other['layers_0'])
  wide = toy_t5.params(toy_t5.config(V, embed_dim=16), seed=3)
  with pytest.raises(ValueError, match='fit the drafter'):
    jax.eval_shape(
      functools.partial(glancing.init_params, config), jax.random.key(0), wide
    )


@pytest.mark.slow
def test_training_teaches_to_fill_blocks():
  """A text that is its source, told in numbers: accuracy rises."""
  optax = pytest.importorskip('optax')
  config = toy_block.config(
    V, embed_dim=16, head_dim=8, mlp_dim=32, num_encoder_layers=1
  )
  optimizer = optax.adam(1e-2)
  params = toy_block.params(config, seed=1)
  run = run_checkpoints.Run(
    step=jnp.zeros((), jnp.int32),
    params=params,
    opt_state=optimizer.init(params),
    rng_key=jax.random.key(0),
  )
  step = jax.jit(
    functools.partial(
      loop.step,
      loss_fn=glancing.block_loss(config, gamma=GAMMA),
      optimizer=optimizer,
    )
  )
  rng = np.random.default_rng(0)
  accuracies = []
  for _ in range(60):
    texts = jnp.asarray(rng.integers(2, V, (32, 5)), jnp.int32)
    features = {
      'encoder_input_tokens': texts,
      'decoder_target_tokens': texts,
      'decoder_loss_weights': jnp.ones((32, 5), jnp.float32),
      glancing.RATIO: jnp.full(32, 0.3, jnp.float32),
    }
    run, metrics = step(run, features)
    accuracies.append(float(metrics['accuracy']))
  # A tenth is chance.
  assert np.mean(accuracies[:5]) < 0.2
  assert np.mean(accuracies[-10:]) > 0.35


def test_positions_that_are_not_needed_are_not_computed():
  is_needed = jnp.asarray([1, 0, 0, 1, 0, 1, 1, 0, 0, 1, 0], bool)
  x = jnp.asarray(np.random.default_rng(3).normal(size=(11, 3)), jnp.float32)
  # Of eleven positions, two parts of four are taken: the last three that are
  # not needed are never read.
  skipped = np.flatnonzero(~is_needed)[-3:]
  each = functools.partial(glancing._each, is_needed=is_needed, size=4)
  found = jax.jit(lambda x: each(lambda x: x.sum(-1) > 0, x))(
    x.at[skipped].set(jnp.nan)
  )
  np.testing.assert_array_equal((found == (x.sum(-1) > 0))[is_needed], True)
