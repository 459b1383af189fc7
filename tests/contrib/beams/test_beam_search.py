"""Beam search against T5X's own, enumeration, and a plain reference; scores of
given tokens against T5X's own and a plain decode."""

import functools
import itertools
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments.beams import plain as reordering
from specdec_jax import arrays as arrays_lib
from specdec_jax.assembly import packed_settings
from specdec_jax.assembly.text_settings import TextSettings
from specdec_jax.base import Params, Prompt
from specdec_jax.checkpoints import t5x
from specdec_jax.decoding import scoring
from specdec_jax.models import families, t5
from tests import decoders, toy, toy_t5

T5X = pathlib.Path(__file__).parents[2] / 'golden' / 't5x'
EOS = 1
VOCAB_SIZE = 4
PROMPTS = [[0], [0, 2], [0, 3, 2], [0, 2]]
LIMITS = [5, 5, 6, 4]


def search(model, params, prompt, *, num_beams, max_len, **kwargs):
  kwargs = {'eos_id': EOS, 'alpha': 0.6} | kwargs
  generate = functools.partial(
    reordering.generate,
    target=model,
    num_beams=num_beams,
    max_len=max_len,
    **kwargs,
  )
  output = jax.jit(generate)(Params(params), prompt)
  return jax.tree.map(np.asarray, output)


def found(output, row: int) -> list[tuple[float, tuple[int, ...]]]:
  """Scores and sequences of a row, best first, without empty slots."""
  return [
    (float(output.scores[row, k]), tuple(output.tokens[row, k, :length]))
    for k, length in reversed(list(enumerate(output.lengths[row])))
    if length
  ]


class Chain:
  """A toy chain's log-probabilities, and a sequence's score."""

  def __init__(self, params, alpha: float):
    table = np.asarray(params['table'], np.float64)
    log_sum = np.log(np.sum(np.exp(table), axis=-1, keepdims=True))
    self.log_probs, self.alpha = table - log_sum, alpha

  def log_prob(self, tokens, prompt) -> float:
    total = 0.0
    for i in range(len(prompt), len(tokens)):
      before = tokens[i - 2] if i > 1 else VOCAB_SIZE
      total += self.log_probs[before, tokens[i - 1], tokens[i]]
    return total

  def score(self, tokens, prompt) -> float:
    penalty = ((5 + len(tokens) - 1) / 6) ** self.alpha
    return self.log_prob(tokens, prompt) / penalty


def every_sequence(prompt, limit: int):
  """All continuations that end with EOS within the limit."""
  others = [i for i in range(VOCAB_SIZE) if i != EOS]
  for count in range(limit - len(prompt)):
    for middle in itertools.product(others, repeat=count):
      yield (*prompt, *middle, EOS)


def reference(chain: Chain, prompt, limit: int, num_beams: int):
  """Beam search without early stopping, one row, in Python."""
  live, finished = [tuple(prompt)], []
  for _ in range(limit - len(prompt)):
    grown = [(*beam, i) for beam in live for i in range(VOCAB_SIZE)]
    grown.sort(key=lambda tokens: -chain.log_prob(tokens, prompt))
    grown = grown[: 2 * num_beams]
    finished += [tokens for tokens in grown if tokens[-1] == EOS]
    live = [tokens for tokens in grown if tokens[-1] != EOS][:num_beams]
  finished.sort(key=lambda tokens: -chain.score(tokens, prompt))
  return finished[:num_beams]


@pytest.fixture(scope='module')
def golden():
  """The fixture's weights, prompt and T5X's outputs."""
  config = t5.T5Config(
    vocab_size=128,
    embed_dim=64,
    num_encoder_layers=2,
    num_decoder_layers=2,
    num_heads=4,
    head_dim=16,
    mlp_dim=128,
  )
  params = t5x.read_target(T5X / 't5x_orbax', families.param_shapes(config))
  arrays = np.load(T5X / 'golden_encdec.npz')
  rows = len(arrays['greedy'])
  prompt = Prompt(
    encoder_tokens=jnp.asarray(arrays['encoder_input_tokens']),
    decoder_tokens=jnp.zeros((rows, 1), jnp.int32),
    decoder_lengths=jnp.ones(rows, jnp.int32),
    row_ids=jnp.arange(rows, dtype=jnp.int32),
  )
  return families.language_model(config), params, prompt, arrays


def test_four_beams_are_those_of_t5x(golden):
  model, params, prompt, arrays = golden
  output = search(model, params, prompt, num_beams=4, max_len=17)
  np.testing.assert_array_equal(output.tokens[:, :, 1:], arrays['beam4'])
  np.testing.assert_allclose(
    output.scores, arrays['beam4_scores'], rtol=0, atol=2e-5
  )
  is_eos = arrays['beam4'] == EOS
  np.testing.assert_array_equal(output.is_finished, is_eos.any(axis=2))
  np.testing.assert_array_equal(output.lengths, is_eos.argmax(axis=2) + 2)


def test_one_beam_is_greedy_on_the_golden(golden):
  model, params, prompt, arrays = golden
  output = search(model, params, prompt, num_beams=1, max_len=17)
  np.testing.assert_array_equal(output.tokens[:, 0, 1:], arrays['greedy'])


@pytest.mark.parametrize('none', [-1, ()])
def test_one_beam_without_an_end_is_greedy(none):
  model, params = toy.toy(7), toy.toy_params(7, seed=3)
  prompt = toy.prompt([[2, 3, 1], [4], [5, 6]], max_lengths=[10, 9, 10])
  output = search(model, params, prompt, num_beams=1, max_len=10, eos_id=none)
  greedy = decoders.plain(
    model, Params(params), prompt, to_probs=decoders.GREEDY, max_len=10
  )
  np.testing.assert_array_equal(output.tokens[:, 0], greedy.tokens)
  np.testing.assert_array_equal(output.lengths[:, 0], greedy.lengths)
  np.testing.assert_allclose(
    output.scores[:, 0], greedy.log_probs.sum(axis=1), atol=1e-4
  )
  assert not output.is_finished.any()


@pytest.mark.parametrize('alpha', [0.0, 0.6, 1.5])
def test_all_beams_are_all_sequences(alpha):
  params = toy.toy_params(VOCAB_SIZE, seed=11)
  prompt = toy.prompt(PROMPTS, max_lengths=LIMITS)
  output = search(
    toy.toy(VOCAB_SIZE), params, prompt, num_beams=81, max_len=6, alpha=alpha
  )
  chain = Chain(params, alpha)
  for row, (start, limit) in enumerate(zip(PROMPTS, LIMITS, strict=True)):
    expected = sorted(
      ((chain.score(s, start), s) for s in every_sequence(start, limit)),
      reverse=True,
    )
    assert [s for _, s in found(output, row)] == [s for _, s in expected]
    np.testing.assert_allclose(
      [score for score, _ in found(output, row)],
      [score for score, _ in expected],
      atol=1e-5,
    )


@pytest.mark.slow
@pytest.mark.parametrize('num_beams', [1, 3, 81])
def test_padding_ids_are_impossible_and_keep_their_share(num_beams):
  """They are likely ids of the model, and none of the vocabulary; what they
  would have is nobody's, as in T5X."""
  params = toy.toy_params(VOCAB_SIZE, seed=11)
  prompt = toy.prompt(PROMPTS, max_lengths=LIMITS)
  sizes = {'num_beams': num_beams, 'max_len': 6}
  table = np.full((VOCAB_SIZE + 4, VOCAB_SIZE + 3, VOCAB_SIZE + 3), 3.0)
  real = np.r_[:VOCAB_SIZE, -1]
  table[real, :VOCAB_SIZE, :VOCAB_SIZE] = params['table']
  padded = {'table': jnp.asarray(table, jnp.float32)}
  model = toy.toy(VOCAB_SIZE + 3)
  assert search(model, padded, prompt, **sizes).tokens.max() >= VOCAB_SIZE
  output = search(model, padded, prompt, **sizes, vocab_size=VOCAB_SIZE)
  chain = Chain(padded, 0.6)
  chain.log_probs = chain.log_probs[real][:, :VOCAB_SIZE, :VOCAB_SIZE]
  for row, (start, limit) in enumerate(zip(PROMPTS, LIMITS, strict=True)):
    expected = reference(chain, start, limit, num_beams)
    assert output.is_finished[row].sum() == len(expected)
    if not expected:
      continue
    assert [tokens for _, tokens in found(output, row)] == expected
    np.testing.assert_allclose(
      [score for score, _ in found(output, row)],
      [chain.score(tokens, start) for tokens in expected],
      atol=1e-5,
    )


@pytest.mark.parametrize('num_beams', [2, 3])
def test_few_beams_are_the_reference_s(num_beams):
  prompt = toy.prompt(PROMPTS, max_lengths=LIMITS)
  run = jax.jit(
    functools.partial(
      reordering.generate,
      target=toy.toy(VOCAB_SIZE),
      num_beams=num_beams,
      max_len=6,
      eos_id=EOS,
    )
  )
  differ = 0
  for seed in range(20):
    params = toy.toy_params(VOCAB_SIZE, seed=seed)
    chain = Chain(params, 0.6)
    output = jax.tree.map(np.asarray, run(Params(params), prompt))
    for row, (start, limit) in enumerate(zip(PROMPTS, LIMITS, strict=True)):
      expected = reference(chain, start, limit, num_beams)
      assert [tokens for _, tokens in found(output, row)] == expected
      best = sorted(
        every_sequence(start, limit), key=lambda s: -chain.score(s, start)
      )
      differ += best[:num_beams] != expected
  assert differ  # Or pruning was never put to the test.


class Processed(Chain):
  """The chain with a repetition penalty of 2, without bigrams that repeat."""

  def log_prob(self, tokens, prompt) -> float:
    total = 0.0
    for i in range(len(prompt), len(tokens)):
      before, (last, new) = tokens[:i], tokens[i - 1 : i + 1]
      value = self.log_probs[before[-2] if i > 1 else VOCAB_SIZE, last, new]
      total += value * 2 if new in before else value
      if (last, new) in itertools.pairwise(before):
        return -np.inf
    return total


def test_beams_are_processed():
  prompt = toy.prompt(PROMPTS, max_lengths=LIMITS)
  way = TextSettings(repetition_penalty=2.0, no_repeat_ngram_size=2)
  process = packed_settings.packer([way], eos_ids=(EOS,), vocab_size=VOCAB_SIZE)
  prompt = process([0] * len(PROMPTS), prompt)
  generate = functools.partial(
    reordering.generate,
    target=toy.toy(VOCAB_SIZE),
    num_beams=3,
    max_len=6,
    eos_id=EOS,
  )
  run, differ = jax.jit(generate), 0
  for seed in range(10):
    params = toy.toy_params(VOCAB_SIZE, seed=seed)
    chain = Processed(params, 0.6)
    output = jax.tree.map(np.asarray, run(Params(params), prompt))
    for row, (start, limit) in enumerate(zip(PROMPTS, LIMITS, strict=True)):
      expected = reference(chain, start, limit, 3)
      scores = [chain.score(tokens, start) for tokens in expected]
      expected = expected[: sum(np.isfinite(scores))]
      scores = scores[: len(expected)]
      assert [tokens for _, tokens in found(output, row)] == expected
      np.testing.assert_allclose(
        [score for score, _ in found(output, row)], scores, rtol=1e-5
      )
      differ += expected != reference(Chain(params, 0.6), start, limit, 3)
  assert differ


def test_beams_to_which_no_token_is_left_end_as_with_nan():
  # Nothing may come behind 2, the second row's last token. The third row, of
  # which all but that ends, has a beam that ended.
  never = [[2, token] for token in range(VOCAB_SIZE)]
  ways = [
    TextSettings(),
    TextSettings(bad_words_ids=never),
    TextSettings(bad_words_ids=[*never, [3, 0], [3, 3]]),
  ]
  prompt = toy.prompt([[0, 2], [0, 2], [0, 3]], max_lengths=[5] * 3)
  process = packed_settings.packer(ways, eos_ids=(EOS,), vocab_size=VOCAB_SIZE)
  prompt = process(range(3), prompt)
  params = toy.toy_params(VOCAB_SIZE, seed=1)
  output = search(toy.toy(VOCAB_SIZE), params, prompt, num_beams=2, max_len=5)
  assert output.has_nan.tolist() == [False, True, False]
  assert [tokens for _, tokens in found(output, 2)] == [(0, 3, 1)]


@pytest.mark.slow
def test_caches_that_lose_their_identity_are_reordered_all_the_same():
  config = toy_t5.config(7)
  model, params = families.language_model(config), toy_t5.params(config, seed=5)
  prompt = toy.prompt(
    [[0], [0], [0]], encoder_rows=[[3, 4, 1], [5, 1], [6, 6, 2, 1]]
  )
  jitted = model._replace(extend=jax.jit(model.extend))
  sizes = {'num_beams': 3, 'max_len': 9}
  plain = search(model, params, prompt, **sizes)
  again = search(jitted, params, prompt, **sizes)
  np.testing.assert_array_equal(plain.tokens, again.tokens)
  assert len({tuple(beam) for beam in plain.tokens[0]}) == 3


def settled_chain(*, is_broken: bool):
  """After 0 come 2 and 3, then most likely the end, else 4 and then NaN."""
  table = np.full((6, 5, 5), -20.0)
  table[:, 0, 2:4] = 0.0
  table[:, 2:4, EOS] = np.log(0.9)
  table[:, 2:4, 4] = np.log(0.1)
  table[:, 4] = np.nan
  if is_broken:
    table[:, 3] = np.nan
  return {'table': jnp.asarray(table, jnp.float32)}


def test_a_settled_row_is_not_searched_further():
  """Its next call would have met the NaN."""
  output = search(
    toy.toy(5),
    settled_chain(is_broken=False),
    toy.prompt([[0]]),
    num_beams=2,
    max_len=6,
  )
  assert not output.has_nan.any()
  assert sorted(tokens for _, tokens in found(output, 0)) == [
    (0, 2, 1),
    (0, 3, 1),
  ]


def test_not_a_number_stops_its_row_alone():
  output = search(
    toy.toy(5),
    settled_chain(is_broken=True),
    toy.prompt([[0, 3], [0, 2]]),
    num_beams=1,
    max_len=6,
  )
  assert output.has_nan.tolist() == [True, False]
  assert found(output, 1)[0][1] == (0, 2, 1)


def test_several_ids_can_end_a_sequence():
  params = toy.toy_params(VOCAB_SIZE, seed=2)
  output = search(
    toy.toy(VOCAB_SIZE),
    params,
    toy.prompt([[0]]),
    num_beams=9,
    max_len=3,
    eos_id=(1, 3),
  )
  chain, ends = Chain(params, 0.6), (1, 3)
  expected = [(0, i) for i in ends] + [(0, j, i) for j in (0, 2) for i in ends]
  expected.sort(key=lambda tokens: -chain.score(tokens, [0]))
  assert [tokens for _, tokens in found(output, 0)] == expected


@pytest.mark.parametrize(
  ('settings', 'message'),
  [
    ({'num_beams': 0}, r'num_beams.*got 0'),
    ({'alpha': -1}, r'alpha.*got -1'),
    ({'max_len': 2}, r'3 tokens.*max_len 2'),
    ({'prompt': toy.prompt([], width=3)}, '0 rows'),
  ],
)
def test_bad_input_is_one_sentence(settings, message):
  usual = {'prompt': toy.prompt([[0, 1, 2]]), 'num_beams': 2, 'max_len': 5}
  with pytest.raises(ValueError, match=message):
    search(toy.toy(3), toy.toy_params(3, seed=0), **usual | settings)


def test_scores_are_those_of_t5x(golden):
  """T5X's `score_batch`, and its teacher-forced logits, of the golden batch."""
  model, params, prompt, arrays = golden
  targets = jnp.asarray(arrays['decoder_target_tokens'])
  weights = arrays['decoder_loss_weights']
  score = jax.jit(functools.partial(scoring.score, target=model))
  output = score(
    Params(target=params),
    prompt,
    targets,
    jnp.asarray(weights.sum(axis=1), jnp.int32),
  )
  np.testing.assert_allclose(
    output.scores, arrays['score'], rtol=1e-6, atol=2e-5
  )
  direct = arrays['logits'] - log_sum_exp(arrays['logits'])
  direct = np.take_along_axis(direct, targets[:, :, None], axis=2)[:, :, 0]
  np.testing.assert_allclose(
    output.scores, (direct * weights).sum(axis=1), rtol=1e-6, atol=2e-5
  )


def log_sum_exp(logits):
  top = logits.max(axis=-1, keepdims=True)
  return top + np.log(np.exp(logits - top).sum(axis=-1, keepdims=True))


def test_the_score_of_what_was_decoded():
  """Behind prompts of different lengths, and of some of the tokens alone."""
  model, params = toy.toy(7), toy.toy_params(7, seed=3)
  prompt = toy.prompt([[2, 3, 1], [4], [5, 6]], max_lengths=[10, 9, 10])
  decoded = decoders.plain(
    model, Params(params), prompt, to_probs=decoders.GREEDY, max_len=10
  )
  starts = prompt.decoder_lengths
  tokens = arrays_lib.read_block(decoded.tokens, starts, 9)
  log_probs = arrays_lib.read_block(decoded.log_probs, starts, 9)
  score = jax.jit(functools.partial(scoring.score, target=model))
  for cut in (0, 2):
    lengths = decoded.lengths - starts - cut
    output = score(Params(params), prompt, tokens, lengths)
    expected = jnp.where(arrays_lib.is_within(lengths, 9), log_probs, 0).sum(
      axis=1
    )
    np.testing.assert_allclose(output.scores, expected, rtol=0, atol=1e-5)
    np.testing.assert_array_equal(output.statistics.num_tokens, lengths)
