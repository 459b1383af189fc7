"""Blockwise parallel decoding: heads that read the target's last call."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments.xia2023 import recipes
from specdec_jax import verification
from specdec_jax.base import Params
from specdec_jax.checkpoints import orbax
from specdec_jax.contrib.block_heads.blockwise_heads import blockwise_heads
from specdec_jax.contrib.block_heads.network import BlockHeads, BlockHeadsConfig
from specdec_jax.decoding import autoregressive, speculative
from specdec_jax.decoding.method import Method
from specdec_jax.models import families
from specdec_jax.models.t5 import T5
from specdec_jax.sampling import logits
from tests import decoders, toy, toy_t5

V, MAX_LEN, GAMMA, EOS, NUM_ROWS = 12, 18, 3, 1, 24
CONFIG = toy_t5.config(V)
HEADS = BlockHeadsConfig(embed_dim=8, gamma=GAMMA, mlp_dim=12)
BOUND = families.bind(CONFIG, HEADS, width=GAMMA + 1)
METHOD = Method(
  target=BOUND.target,
  drafter=blockwise_heads(BOUND.model, gamma=GAMMA),
  verify_fn=verification.greedy,
  logits_to_probs=logits.standardize(temperature=0.0),
  eos_id=EOS,
)


@functools.cache
def weights() -> Params:
  rng = np.random.default_rng(2)
  heads = jax.tree.map(
    lambda leaf: jnp.asarray(
      rng.normal(size=leaf.shape) / np.sqrt(leaf.shape[1]), leaf.dtype
    ),
    families.param_shapes(HEADS),
  )
  target = toy_t5.params(CONFIG, seed=1, scale=1.5)
  return Params(target, {'heads': heads, 'target': target})


@functools.cache
def sources() -> list[list[int]]:
  rng = np.random.default_rng(0)
  rows = [rng.integers(2, V, rng.integers(1, 9)) for _ in range(NUM_ROWS)]
  return [[*row.tolist(), EOS] for row in rows]


def prompt():
  # Some texts go on from a prompt of three tokens.
  return toy.prompt(
    [[0, 5, 7][: 1 + 2 * (i % 2)] for i in range(NUM_ROWS)],
    encoder_rows=sources(),
  )


@jax.jit
def hidden_states(params, source, text):
  return T5(CONFIG).apply({'params': params}, source, text, method=T5.hidden)


@jax.jit
def guesses(params, hidden):
  """What the heads make of `[B, embed]`."""
  ahead = BlockHeads(HEADS).apply({'params': params['heads']}, hidden)
  return (
    T5(CONFIG)
    .apply({'params': params['target']}, ahead, method=T5.project)
    .argmax(-1)
  )


@functools.cache
def traced():
  """The state after every iteration's info, and the last state."""
  state = jax.jit(
    lambda params, prompt: speculative.init(
      params, jax.random.key(0), prompt, method=METHOD, max_len=MAX_LEN
    )
  )(weights(), prompt())
  step = jax.jit(functools.partial(speculative.step, method=METHOD))
  infos = []
  while not state.done.all():
    state, info = step(weights(), state)
    infos.append(info)
  return infos, state


def test_output_is_greedy_decoding():
  generate = functools.partial(
    autoregressive.generate,
    method=Method(
      target=families.language_model(CONFIG),
      logits_to_probs=logits.standardize(temperature=0.0),
      eos_id=EOS,
    ),
    max_len=MAX_LEN,
  )
  plain = jax.jit(generate)(weights(), jax.random.key(0), prompt())
  _, state = traced()
  assert decoders.rows(speculative.output(state)) == decoders.rows(plain)
  accepted = int(state.statistics.num_accepted.sum())
  assert 0 < accepted < int(state.statistics.num_tested.sum())


@pytest.mark.slow
def test_heads_read_the_state_that_made_the_last_token():
  """Every draft against teacher forcing of the finished text: whatever was
  accepted before, it comes from the position two before the next token."""
  infos, state = traced()
  rows = decoders.rows(speculative.output(state))
  text = np.array([row + [0] * (MAX_LEN - len(row)) for row in rows], np.int32)
  states = hidden_states(weights().target, prompt().encoder_tokens, text)
  checked = 0
  for i, info in enumerate(infos):
    lengths = np.asarray(info.draft.lengths)
    positions = np.maximum(np.asarray(info.starts) - 2, 0)
    expected = guesses(
      weights().drafter, states[np.arange(NUM_ROWS), positions]
    )
    is_drafted = lengths > 0
    assert set(lengths[is_drafted].tolist()) <= {GAMMA}
    assert is_drafted.any() == (i > 0)
    np.testing.assert_array_equal(
      np.asarray(info.draft.tokens)[is_drafted], expected[is_drafted]
    )
    checked += is_drafted.sum()
  assert checked > 2 * NUM_ROWS


def test_an_iteration_is_one_call_of_the_target():
  """The first one, whose draft is empty, is a narrow one."""
  _, state = traced()
  counts = state.statistics
  np.testing.assert_array_equal(counts.num_short_runs, 1)
  expected = counts.num_tokens - counts.num_accepted.sum(1)
  # Every run commits one token beside the accepted ones, but for a last block
  # that ended within what was accepted.
  assert (counts.num_target_runs >= expected).all()
  assert (counts.num_target_runs <= expected + 1).all()


def test_widths_must_agree():
  sizes = BlockHeadsConfig(embed_dim=4, gamma=2, mlp_dim=3)
  with pytest.raises(ValueError, match='width 4'):
    families.bind(CONFIG, sizes, width=3)


def test_targets_are_further_on_in_the_same_example():
  batch = {
    'decoder_target_tokens': jnp.array([[5, 6, 1, 7, 8, 9, 1, 0]]),
    'decoder_segment_ids': jnp.array([[1, 1, 1, 2, 2, 2, 2, 0]]),
    'decoder_loss_weights': jnp.array([[1.0] * 7 + [0.0]]),
  }
  targets, weights = recipes.shift(batch, jnp.int32(2), GAMMA)
  expected = [[1, 0, 0, 9, 1, 0, 0, 0]]
  np.testing.assert_array_equal(np.where(weights > 0, targets, 0), expected)
  np.testing.assert_array_equal(weights, [[1, 0, 0, 1, 1, 0, 0, 0]])


@pytest.mark.slow
def test_a_step_trains_one_head_and_reads_the_next_texts(tmp_path):
  """The gradient of a step is nonzero for the drawn head alone, and the loss is
  that of this head's guesses."""
  source = jnp.asarray(prompt().encoder_tokens)
  rng = np.random.default_rng(0)
  targets = jnp.asarray(rng.integers(2, V, (NUM_ROWS, 8)), jnp.int32)
  batch = {
    'encoder_input_tokens': source,
    'encoder_segment_ids': (source > 0).astype(jnp.int32),
    'decoder_input_tokens': jnp.pad(targets[:, :-1], ((0, 0), (1, 0))),
    'decoder_target_tokens': targets,
    'decoder_segment_ids': jnp.ones_like(targets),
    'decoder_loss_weights': jnp.ones(targets.shape, jnp.float32),
  }
  orbax.save(tmp_path, CONFIG, weights().target)
  loss_fn = recipes.block_heads_loss(HEADS, target=str(tmp_path))

  @jax.jit
  def gradient(params, key):
    loss_of = lambda params: (lambda sums: (sums.loss, sums))(
      loss_fn(params, batch, key)
    )
    return jax.grad(loss_of, has_aux=True)(params)

  states = hidden_states(
    weights().target, source, batch['decoder_input_tokens']
  )
  made = np.stack(
    [guesses(weights().drafter, states[:, t]) for t in range(8)], axis=1
  )
  drawn = set()
  for seed in range(6):
    grads, sums = gradient(weights().drafter['heads'], jax.random.key(seed))
    touched = np.flatnonzero(np.abs(grads['wi']).max((1, 2)))
    assert touched.size == 1
    head = int(touched[0])
    drawn.add(head)
    ahead = head + 1
    correct = made[:, : 8 - ahead, head] == np.asarray(targets)[:, ahead:]
    assert int(sums.weight) == NUM_ROWS * (8 - ahead)
    assert int(sums.num_correct) == int(correct.sum())
  assert len(drawn) > 1
