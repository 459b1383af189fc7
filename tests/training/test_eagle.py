"""EAGLE-3 drafters in training: the loss, the unrolled steps, whole runs."""

import functools
import itertools
import json
import re
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specdec_jax.checkpoints import loading
from specdec_jax.cli import main as cli
from specdec_jax.launch import processes
from specdec_jax.models import families
from specdec_jax.models.drafting import eagle as network
from specdec_jax.models.drafting.eagle import EagleConfig
from specdec_jax.models.llama import LlamaConfig
from specdec_jax.training import chunked, eagle, eagle_start, metrics_log
from specdec_jax.training.data import written_texts
from specdec_jax.training.eagle import TargetHead
from specdec_jax.training.losses import LossSums
from tests.cli import tiny

SIZES = {
  'vocab_size': 11,
  'embed_dim': 8,
  'num_heads': 4,
  'num_kv_heads': 2,
  'head_dim': 4,
  'mlp_dim': 16,
}
CONFIG = EagleConfig(
  **SIZES,
  draft_vocab_size=6,
  target_embed_dim=8,
  feature_layers=(1, 2),
  fc_norm=True,
  norm_before_next=True,
)
STEPS = 4


def softmax(x):
  x = np.exp(x - x.max(axis=-1, keepdims=True))
  return x / x.sum(axis=-1, keepdims=True)


def project(config, params, hidden):
  """Logits of hidden states."""
  return network.Eagle(config).apply(
    {'params': params}, hidden, method=network.Eagle.project
  )


def test_the_loss_and_its_gradient():
  """In numpy, with p that has mass outside of what can be drafted."""
  rng = np.random.default_rng(0)
  p = softmax(rng.normal(size=(5, 9)))[:, :7]
  logits = rng.normal(size=(5, 7))
  q = softmax(logits)
  alpha = np.minimum(p, q).sum(-1)
  kl = (p * np.log(p / q)).sum(-1)
  share = np.exp(-3 * alpha)
  loss, *others = eagle.lk_loss(
    jnp.asarray(np.log(p), jnp.float32), jnp.asarray(logits, jnp.float32)
  )
  close = functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-6)
  close(loss, share * kl + (1 - share) * (1 - alpha))
  close(others[0], kl)
  close(others[1], alpha)
  gradient = jax.grad(
    lambda x: eagle.lk_loss(jnp.asarray(np.log(p), jnp.float32), x)[0].sum()
  )(jnp.asarray(logits, jnp.float32))
  is_less = q < p
  of_kl = p.sum(-1, keepdims=True) * q - p
  of_alpha = q * (is_less - (q * is_less).sum(-1, keepdims=True))
  close(gradient, share[:, None] * of_kl - (1 - share[:, None]) * of_alpha)


def test_the_targets_distribution_is_that_of_all_its_tokens():
  """Its normaliser comes from the log-probability of the token that follows."""
  rng = np.random.default_rng(1)
  head = TargetHead(
    embedding=jnp.zeros((11, 8), jnp.float32),
    rows=jnp.asarray(rng.normal(size=(11, 8)), jnp.float32),
    norm=jnp.asarray(rng.normal(size=8), jnp.float32),
  )
  last = rng.normal(size=(2, 5, 8)).astype(np.float32)
  tokens = rng.integers(0, 11, (2, 5))
  x = last / np.sqrt((last**2).mean(-1, keepdims=True) + 1e-5)
  expected = np.log(
    softmax(x * np.asarray(head.norm) @ np.asarray(head.rows).T)
  )
  recorded = np.zeros((2, 5), np.float32)
  for row in range(2):
    for t in range(4):
      recorded[row, t + 1] = expected[row, t, tokens[row, t + 1]]
  ids = jnp.asarray([1, 4, 5, 9])
  batch = {
    'decoder_target_tokens': jnp.asarray(tokens, jnp.int32),
    'log_probs': jnp.asarray(recorded),
  }
  states = eagle.target_states(head, jnp.asarray(last), batch, epsilon=1e-5)
  found = eagle.target_log_probs(head.rows[ids], *states)
  np.testing.assert_allclose(
    found[:, :4], expected[:, :4][..., np.asarray(ids)], rtol=1e-4, atol=1e-5
  )


def test_positions_without_a_loss_are_not_computed():
  """The sums and the gradient of the others are those of one part."""
  rng = np.random.default_rng(3)
  draw = lambda *shape: jnp.asarray(rng.normal(size=shape), jnp.float32)
  is_needed = jnp.asarray([1, 0, 0, 1, 0, 1, 1, 0, 0, 1, 0], bool)
  # Of eleven positions, two parts of four are taken: the last three that are
  # not needed are never read.
  skipped = np.flatnonzero(~is_needed)[-3:]
  w, x = draw(3, 7), draw(11, 3)
  constants = {'weight': is_needed.astype(jnp.float32) * jnp.abs(draw(11))}

  def sums(w, x, constants, shared):
    y = jnp.tanh(x @ w + shared[None]) @ jnp.ones(7)
    loss = (y**2 * constants['weight']).sum()
    ones = constants['weight'].sum()
    figures = {'mean': jnp.stack(((y * constants['weight']).sum(), ones))}
    return LossSums(
      loss=loss, nats=2 * loss, num_correct=ones, weight=ones, figures=figures
    )

  def in_parts(w, x):
    found = chunked.summed(
      sums, w, x, constants, shift, is_needed=is_needed, size=4
    )
    return 3 * found.loss, found

  shift = draw(7)
  whole = lambda w, x: (
    3 * (found := sums(w, x, constants, shift)).loss,
    found,
  )
  close = functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-5)
  differentiated = lambda f: jax.jit(jax.grad(f, (0, 1), has_aux=True))
  expected = differentiated(whole)(w, x)
  with_nan = x.at[skipped].set(jnp.nan)
  found = differentiated(in_parts)(w, with_nan)
  jax.tree.map(close, found, expected)
  jax.tree.map(close, jax.jit(in_parts)(w, with_nan)[1], expected[1])


def test_unrolled_steps_are_those_of_drafting():
  """From every position of two packed texts, step by step with a cache."""
  rng = np.random.default_rng(2)
  draw = lambda *shape: jnp.asarray(rng.normal(size=shape), jnp.float32)
  params = network.init_params(CONFIG, jax.random.key(0))
  params = jax.tree.map(
    lambda x: x + 0.3 * draw(*x.shape) if x.dtype == jnp.float32 else x, params
  )
  embedding = draw(11, 8)
  lengths = 9, 12
  segments = np.repeat([1, 2, 0], (*lengths, 3))[None]
  tokens = jnp.asarray(rng.integers(0, 11, segments.shape), jnp.int32)
  features = draw(*segments.shape, 16)
  batch = {
    'decoder_target_tokens': tokens,
    'decoder_segment_ids': jnp.asarray(segments, jnp.int32),
  }

  @jax.jit
  def unrolled(params):
    hidden = eagle.unroll(
      CONFIG, params, embedding, batch, features, num_steps=STEPS
    )
    return [project(CONFIG, params, each) for each in hidden]

  found = unrolled(params)

  target = LlamaConfig(num_layers=2, **SIZES)
  model = families.bind(target, CONFIG, width=STEPS).model
  weights = {'eagle': params, 'token_embedder': {'embedding': embedding}}

  @jax.jit
  def draft(tokens, features, start):
    """As the drafter does: true features up to `start`, then its own."""
    size = tokens.shape[1]
    cache = model.init(weights, 1, size + STEPS)
    hidden = model.join(weights, features)
    after = jnp.roll(tokens, -1, axis=1)
    logits, hidden, cache = model.extend(
      weights, after, hidden, cache, start[None]
    )
    cache = model.rewind(cache, start[None] + 1)
    found = [logits]
    for i in range(1, STEPS):
      token = jax.lax.dynamic_slice_in_dim(tokens, start + i + 1, 1, axis=1)
      logits, hidden, cache = model.extend(
        weights, token, hidden, cache, jnp.zeros(1, jnp.int32)
      )
      found.append(logits)
    logits = jnp.concatenate(found, axis=1)[0]
    return jnp.take(logits, params['target_ids'], axis=1)

  begin = 0
  for length in lengths:
    span = slice(begin, begin + length)
    for start in range(length - 1 - STEPS):
      at = jnp.asarray(start, jnp.int32)
      expected = draft(tokens[:, span], features[:, span], at)
      own = np.stack([logits[0, begin + start] for logits in found])
      np.testing.assert_allclose(own, expected, rtol=2e-4, atol=2e-5)
    begin += length


@pytest.fixture(scope='module')
def texts(tmp_path_factory):
  """A tiny model's texts after forty prompts, and the model."""
  folder = tmp_path_factory.mktemp('eagle')
  model = tiny.write_model(folder / 'model', num_layers=3)
  prompts = [f'{"the in " * (i % 5)}ab{i}' for i in range(40)]
  (folder / 'prompts.txt').write_text('\n'.join(prompts))
  status = cli.main(
    [
      *('data', 'write', '--model', model, '--chat'),
      *('--prompts', str(folder / 'prompts.txt')),
      *('--out', str(folder / 'texts'), '--layers', '1', '2', '3'),
      *('--max_new_tokens', '16', '--batch_size', '8', '--part_size', '16'),
      *('--temperature', '0', '1'),
    ]
  )
  assert status == 0
  return folder


def train(folder, name, steps, *bindings) -> int:
  return cli.main(
    [
      'train',
      '--gin_file=runs/train_eagle.gin',
      f'--gin.TARGET="{folder / "model"}"',
      f'--gin.TEXTS="{folder / "texts"}"',
      f'--gin.MODEL_DIR="{folder / name}"',
      f'--gin.TRAIN_STEPS={steps}',
      '--gin.DRAFT_VOCAB_SIZE=64',
      '--gin.BATCH_SIZE=8',
      '--gin.LENGTH=64',
      '--gin.NUM_STEPS=2',
      '--gin.EVAL_PERIOD=4',
      '--gin.CHECKPOINT_PERIOD=2',
      '--gin.loop.Schedule.log_period=2',
      *bindings,
    ]
  )


@pytest.mark.slow
def test_a_run_that_was_stopped_goes_on(texts, capsys):
  """Bit by bit; the network that it leaves can be read."""
  whole = texts / 'whole'
  assert train(texts, 'whole', 4) == 0
  assert '64 of 264 tokens' in capsys.readouterr().out
  # The rate depends on where a run ends.
  rate = '--gin.optimizers.learning_rate.steps_per_cycle=4'
  for steps in (2, 4):
    assert train(texts, 'halves', steps, rate) == 0
  config, params = loading.read(whole / 'model')
  assert config.feature_layers == (1, 2)
  assert families.only_drafts(config)
  _, again = loading.read(texts / 'halves' / 'model')
  jax.tree.map(np.testing.assert_array_equal, params, again)

  def lines(name):
    found = metrics_log.read_log(texts / name / metrics_log.NAME)
    for line in found:
      line.pop('targets_per_second', None)
      line.pop('targets_per_processor_second', None)
    return found

  assert [line['step'] for line in lines('whole')] == [2, 4, 4]
  assert lines('whole')[:2] == [
    line for line in lines('halves') if 'validation_nats' not in line
  ]
  for line in lines('whole')[:2]:
    assert 0 < line['alpha_1'] <= line['coverage'] <= 1.001
    assert 0 < line['alpha_2'] < 1
  assert 0 < lines('whole')[2]['validation_alpha_1'] < 1


@pytest.mark.slow
def test_a_run_begins_from_another(texts):
  """And not from the target, which it begins from without."""
  assert train(texts, 'first', 2) == 0
  first = texts / 'first' / 'model'
  still = '--gin.LEARNING_RATE=1e-30'
  path = f'--gin.INITIAL_CHECKPOINT_PATH="{first}"'
  assert train(texts, 'second', 2, still, path) == 0
  _, expected = loading.read(first)
  _, found = loading.read(texts / 'second' / 'model')
  jax.tree.map(np.testing.assert_array_equal, expected, found)


@pytest.mark.slow
def test_texts_of_another_target_are_refused(texts, tmp_path, capsys):
  other = tiny.write_model(tmp_path / 'other', num_layers=3, seed=1)
  binding = f'--gin.TARGET="{other}"'
  assert train(texts, 'none', 2, binding) == 2
  assert 'another model' in capsys.readouterr().err
  # Texts of earlier versions do not say which.
  shutil.copytree(texts / 'texts', tmp_path / 'texts')
  path = tmp_path / 'texts' / 'written.json'
  stated = json.loads(path.read_text())
  assert stated.pop('head_sha256')
  path.write_text(json.dumps(stated))
  bindings = binding, f'--gin.TEXTS="{tmp_path / "texts"}"'
  assert train(texts, 'none', 2, *bindings) == 2
  err = capsys.readouterr().err
  assert re.search(r'coverage \d+\.\d+, a probability', err), err


@pytest.mark.slow
def test_a_network_begins_near_its_target(texts):
  """Its hidden state as the last feature, though that is normed by a scale."""
  target = str(texts / 'model')
  config = eagle_start.eagle_config(
    target=target, texts=str(texts / 'texts'), draft_vocab_size=64
  )
  signs = jnp.resize(jnp.array([1.0, 1.0, -1.0]), config.embed_dim)
  scale = signs * jnp.linspace(0.3, 3.0, config.embed_dim)
  found, read = loading.read(loading.locate(target))
  read['layers_2']['pre_self_attention_layer_norm']['scale'] = scale
  params = eagle_start.initial_params(
    config, jax.random.key(0), found, read, target_ids=jnp.arange(64)
  )
  features = jax.random.normal(jax.random.key(1), (1, 9, 2, config.embed_dim))
  hidden = network.Eagle(config).apply(
    {'params': params},
    features.reshape(1, 9, -1),
    method=network.Eagle.join,
  )
  last = features[:, :, 1]
  cosine = lambda a, b: (
    jnp.sum(a * b, -1)
    / (jnp.linalg.norm(a, axis=-1) * jnp.linalg.norm(b, axis=-1))
  )
  assert cosine(hidden, last).min() > 0.95
  assert cosine(hidden, last * scale[None, None]).max() < 0.8


def test_the_loss_of_a_batch_is_that_of_its_positions(
  texts, monkeypatch, capsys
):
  """One by one: where drafting may begin, how far it stays in its text, and
  what the target says there."""
  target = str(texts / 'model')
  found_config, target_params = eagle.read_target(target, jnp.float32)
  head = eagle.head_of(found_config, target_params)
  config = eagle_start.eagle_config(
    target=target, texts=str(texts / 'texts'), draft_vocab_size=64
  )
  monkeypatch.setattr(processes, 'is_first', lambda: False)
  params = eagle_start.eagle_params(
    config, jax.random.key(0), target=target, texts=str(texts / 'texts')
  )
  assert not capsys.readouterr().out
  dataset = written_texts.from_written_texts(
    str(texts / 'texts'), batch_size=2, length=64
  )
  batch = jax.tree.map(jnp.asarray, dataset.batch(0))
  batch['streams'] = batch['streams'].astype(jnp.float32)
  with pytest.raises(ValueError, match='num_steps must be at least 1'):
    eagle.eagle_loss(config, target=target, num_steps=0)
  loss_fn = eagle.eagle_loss(config, target=target, num_steps=2, decay=0.5)
  sums = jax.jit(lambda params: loss_fn(params, batch, None))(params)

  @jax.jit
  def parts(params):
    features, last = jnp.split(batch['streams'], [32], axis=-1)
    hidden = eagle.unroll(
      config, params, head.embedding, batch, features, num_steps=2
    )
    states = eagle.target_states(
      head, last, batch, epsilon=found_config.norm_epsilon
    )
    log_p = eagle.target_log_probs(head.rows[params['target_ids']], *states)
    return log_p, [project(config, params, each) for each in hidden]

  log_p, logits = parts(params)
  segments, weights = (
    np.asarray(batch[f'decoder_{name}'])
    for name in ('segment_ids', 'loss_weights')
  )
  loss, counts, alphas = 0.0, [0, 0], [0.0, 0.0]
  for row, t, i in itertools.product(range(2), range(62), range(2)):
    # Behind t come the token that is known, and i that were drafted.
    span = segments[row, t : t + i + 3]
    is_same = len(span) == i + 3 and (span == span[0]).all()
    if is_same and weights[row, t + 2]:
      own = eagle.lk_loss(log_p[row, t + i + 1], logits[i][row, t])
      loss += 0.5**i * float(own[0])
      alphas[i] += float(own[2])
      counts[i] += 1
  assert counts[0] > counts[1] > 10
  np.testing.assert_allclose(sums.loss, loss, rtol=1e-4)
  for i in range(2):
    np.testing.assert_allclose(
      sums.figures[f'alpha_{i + 1}'], [alphas[i], counts[i]], rtol=1e-4
    )


def test_what_can_be_drafted_is_what_was_written_most(texts):
  counts = written_texts.token_counts(texts / 'texts', 264)
  found = np.zeros(264, np.int64)
  for index in range(3):
    part = written_texts.load_part(texts / 'texts', index)
    for i, given in enumerate(part.prompt_lengths):
      for token in part.tokens[part.offsets[i] + given : part.offsets[i + 1]]:
        found[token] += 1
  np.testing.assert_array_equal(counts, found)
  ids, coverage = written_texts.most_frequent(np.array([3, 0, 5, 5, 0]), 3)
  assert (ids.tolist(), coverage) == ([0, 2, 3], 1.0)
  ids, coverage = written_texts.most_frequent(np.array([3, 0, 5, 5, 0]), 1)
  assert (ids.tolist(), coverage) == ([2], 5 / 13)


def test_batches_hold_every_text_once_with_its_streams(texts):
  dataset = written_texts.from_written_texts(
    str(texts / 'texts'), batch_size=1, length=64, held_out=5
  )
  expected = {}
  for index in range(3):
    part = written_texts.load_part(texts / 'texts', index)
    for i in range(len(part)):
      span = slice(part.offsets[i], part.offsets[i + 1])
      tokens = tuple(part.tokens[span][:64].tolist())
      expected[tokens] = part.streams[span][:64], i % 5 == 0
  found = {}
  rows = [(dataset.batch(i), False) for i in range(40)]
  rows += [(batch, True) for batch in dataset.validation()]
  for row, is_held_out in rows:
    segments = row['decoder_segment_ids'][0]
    for segment in range(1, segments.max() + 1):
      chosen = segments == segment
      tokens = tuple(row['decoder_target_tokens'][0, chosen].tolist())
      streams, is_expected = expected[tokens]
      assert is_held_out == is_expected
      np.testing.assert_array_equal(row['streams'][0, chosen], streams)
      found[tokens] = True
  assert found.keys() == expected.keys()


def test_several_folders_are_read_as_one(texts, tmp_path):
  first, other = texts / 'texts', tmp_path / 'more'
  shutil.copytree(first / 'part-00001', other / 'part-00001')
  shutil.copy(first / 'written.json', other)
  both = [str(first), str(other)]
  counts = [written_texts.token_counts(each, 264) for each in (*both, both)]
  assert counts[1].any()
  np.testing.assert_array_equal(counts[0] + counts[1], counts[2])
  dataset = written_texts.from_written_texts(both, batch_size=1, length=64)
  assert len(dataset.contents) == 4

  config_of = functools.partial(
    eagle_start.eagle_config,
    target=str(texts / 'model'),
    draft_vocab_size=64,
  )
  assert config_of(texts=both) == config_of(texts=both[0])
  description = written_texts.load_description(other).values
  text = json.dumps({**description, 'layers': [1, 3]})
  (other / 'written.json').write_text(text)
  with pytest.raises(ValueError, match=r'more has .* \[1, 3\]'):
    config_of(texts=both)
  with pytest.raises(ValueError, match='no folder'):
    config_of(texts=[])


def test_texts_without_the_last_stream_are_refused(texts, tmp_path):
  written_texts.begin(tmp_path / 'other', {'layers': [1, 2]})
  with pytest.raises(ValueError, match=r'layers \[1, 2\].*3'):
    eagle_start.eagle_config(
      target=str(texts / 'model'), texts=str(tmp_path / 'other')
    )
  with pytest.raises(ValueError, match='0 complete parts'):
    written_texts.from_written_texts(str(tmp_path / 'other'), batch_size=1)


@pytest.mark.parametrize('held_out', [0, 1, -3])
def test_some_texts_are_left_to_train_on(texts, held_out):
  folder = str(texts / 'texts')
  with pytest.raises(ValueError, match=f'held_out {held_out} '):
    written_texts.from_written_texts(folder, batch_size=1, held_out=held_out)
