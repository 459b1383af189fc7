"""Logits that depend on the text before them: the formulas, and that every
position of a block sees the drafts before it."""

import functools
import json
import math
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import specdec_jax
from specdec_jax import drafters, verification
from specdec_jax.assembly import packed_settings
from specdec_jax.assembly.text_settings import TextSettings
from specdec_jax.base import Context, Params, Prompt, Sampling
from specdec_jax.decoding import autoregressive, speculative
from specdec_jax.decoding.method import Method
from specdec_jax.sampling import logits, processors
from specdec_jax.text import generation_config
from tests import slow, toy, toy_tree, trial
from tests.cli import tiny

V, EOS = 4, 3
TARGET, PARAMS = toy.toy(V), toy.toy_params(V, seed=1)
DRAFTER_PARAMS = toy.perturb(PARAMS, seed=2)
# A prompt and what it is told: each setting in a row of its own, the last of
# which have several. Behind it, what notices it: drafts that are not seen, and
# positions that are not processed.
_CASES = {
  (1,): (TextSettings(repetition_penalty=1.8), 'blind', 'late'),
  (0, 2): (TextSettings(presence_penalty=1.5), 'blind', 'late'),
  (0,): (TextSettings(frequency_penalty=1.2), 'blind', 'late'),
  (2, 1, 0): (TextSettings(no_repeat_ngram_size=2), 'blind', 'late'),
  (1, 1, 2): (TextSettings(bad_words_ids=[[1, 2], [2, 0]]), 'blind', 'late'),
  (1, 1): (TextSettings(logit_bias={0: 1.5}), 'late'),
  (2, 2): (TextSettings(min_new_tokens=3), 'blind', 'late'),
  (1, 2): (TextSettings(min_length=5), 'blind', 'late'),
  (2, 1): (TextSettings(begin_suppress_tokens=[1, 0]), 'blind'),
  (0, 0): (
    TextSettings(sequence_bias=[[[1, 2], 2.5], [[0, 1], -2.5]]),
    'blind',
    'late',
  ),
  (0, 1, 2): (TextSettings(suppress_tokens=[2]), 'late'),
  (2, 0, 2): (TextSettings(encoder_no_repeat_ngram_size=2), 'blind', 'late'),
  (1, 0): (TextSettings(forced_decoder_ids=[[4, 2]]), 'blind', 'late'),
  (1, 0, 2): (TextSettings(forced_eos_token_id=EOS), 'blind', 'late'),
  (2,): (
    TextSettings(forced_bos_token_id=1, begin_suppress_tokens=[0, 2]),
    'blind',
    'late',
  ),
  (0, 1): (TextSettings(encoder_repetition_penalty=3.0), 'late'),
  (2, 0): (
    TextSettings(
      presence_penalty=1.0, frequency_penalty=0.7, logit_bias={0: 0.8}
    ),
    'blind',
    'late',
  ),
  (0, 2, 2): (
    TextSettings(
      repetition_penalty=1.5, min_new_tokens=2, bad_words_ids=[[1, 1]]
    ),
    'blind',
    'late',
  ),
}
ROWS = {prompt: way for prompt, (way, *_) in _CASES.items()}


def _told(ways, prompt, *, eos_ids=(EOS,), vocab_size=V):
  """A prompt, each of whose rows is told something else."""
  process = packed_settings.packer(ways, eos_ids=eos_ids, vocab_size=vocab_size)
  prompt = jax.tree.map(np.asarray, prompt)
  return process(range(len(ways)), prompt)


NUM_NEW = 4
OF_PROMPTS = _told(
  [*ROWS.values()],
  toy.prompt([*ROWS], max_lengths=[len(row) + NUM_NEW for row in ROWS]),
).processors


def test_an_ngram_for_which_no_text_has_room_takes_no_time():
  ways = [TextSettings(no_repeat_ngram_size=size) for size in (2**31 - 1, 6)]
  prompt = toy.prompt([(0, 2), (0, 2)], max_lengths=[6, 6])
  assert _told(ways, prompt).processors.ngram_size.tolist() == [0, 6]


def _drafter(rule: str):
  to_probs = logits.standardize()
  if rule == 'traversal':
    return drafters.branching(
      TARGET, tree=toy_tree.BENT, logits_to_probs=to_probs
    )
  return drafters.autoregressive(TARGET, gamma=3, logits_to_probs=to_probs)


def _rule(rule: str):
  if rule == 'traversal':
    return toy_tree.rule(rule, toy_tree.BENT)
  return getattr(verification, rule)


def _trial(rule: str, drafter_params=DRAFTER_PARAMS) -> trial.Trial:
  return trial.Trial(
    target=TARGET,
    params=Params(PARAMS, drafter_params),
    drafter=_drafter(rule),
    verify_fn=_rule(rule),
    prompts=tuple(ROWS),
    num_new=(NUM_NEW,) * len(ROWS),
    eos_id=EOS,
    processors=OF_PROMPTS,
  )


_ALL = [('speculative_sampling',), ('block_verification',), ('traversal',)]


# All processors together, and each with so many decodes, which takes minutes.
@pytest.mark.parametrize(
  ('rule', 'num_decodes'),
  [
    ('traversal', 100_800),
    *(
      pytest.param(*rule, 100_800 * len(ROWS), marks=pytest.mark.campaign)
      for rule in _ALL
    ),
  ],
)
def test_blocks_and_trees_have_plain_decodings_distribution(
  rule, num_decodes, record_property
):
  result = trial.check(
    _trial(rule),
    record_property,
    'Processors through the compiled loop, false alarm rate 1e-9',
    f'{len(ROWS)} rows of other processors, {rule}',
    num_decodes=num_decodes,
  )
  accepted = np.sum(result.statistics.num_accepted)
  assert 0 < accepted < np.sum(result.statistics.num_tested)


@pytest.mark.slow
@pytest.mark.parametrize(
  ('rule', 'variant'),
  [(*rule, variant) for rule in _ALL for variant in ('blind', 'late')],
)
def test_each_notices_what_is_wrong(rule, variant, monkeypatch):
  """Drafts that are not seen, and positions that are not processed."""
  whole = processors._process

  def blind(logits, rows, context, drafted, depths):
    return whole(logits, rows, context, drafted, depths * 0)

  def late(logits, rows, context, drafted, depths):
    made = whole(logits, rows, context, drafted, depths)
    return jnp.concatenate([made[:, :1], logits[:, 1:]], axis=1)

  broken = {'blind': blind, 'late': late}[variant]
  monkeypatch.setattr(processors, '_process', broken)
  report = trial.run(
    _trial(rule), num_decodes=201_600, batch_size=25_200
  ).report
  for i, (way, *variants) in enumerate(_CASES.values(), start=1):
    least = min(
      check.p_value for check in report.checks if f'prompt {i},' in check.name
    )
    assert (least <= 1e-9) == (variant in variants), (way, least)


def _batch(ways, temperature: float):
  """A prompt of ragged rows, each told something else."""
  rows = [[1, 2, 1][: 1 + i % 3] for i in range(len(ways))]
  every = lambda value, kind: jnp.full(len(rows), value, kind)
  sampling = Sampling(
    temperature=every(temperature, jnp.float32),
    top_k=every(V, jnp.int32),
    top_p=every(1, jnp.float32),
    min_p=every(0, jnp.float32),
    typical_p=every(1, jnp.float32),
  )
  prompt = toy.prompt(rows, max_lengths=[MAX_LEN] * len(rows))
  return _told(ways, prompt).replace(sampling=sampling)


# Rows of one batch, for greedy decoding and for draws.
WAYS = [
  TextSettings(),
  TextSettings(repetition_penalty=4.0),
  TextSettings(presence_penalty=1.2),
  TextSettings(frequency_penalty=-0.6, suppress_tokens=[2]),
  TextSettings(no_repeat_ngram_size=4),
  TextSettings(bad_words_ids=[[1, 2], [0, 0, 2]], repetition_penalty=0.8),
  TextSettings(forced_decoder_ids=[[5, 0], [6, 1]]),
  TextSettings(
    encoder_no_repeat_ngram_size=2,
    sequence_bias=[[[2, 0], 9.0], [[0, 0], 9.0]],
  ),
  TextSettings(encoder_repetition_penalty=0.05),
]
MAX_LEN = 14


@functools.cache
def _decode(loop, rule: str, num_ids: int | None = None):
  method = Method(
    target=TARGET,
    drafter=_drafter(rule),
    verify_fn=_rule(rule),
    logits_to_probs=logits.standardize(vocab_size=num_ids),
    eos_id=-1,
    num_ids=num_ids,
  )
  decode = functools.partial(loop.generate, method=method, max_len=MAX_LEN)
  return jax.jit(decode)


_RULES = [('block_verification',), ('traversal',)]


@slow.parametrize(('rule',), _RULES, now=_RULES[:1])
def test_greedy_tokens_are_plain_decodings(rule):
  params, key = Params(PARAMS, DRAFTER_PARAMS), jax.random.key(0)
  plain = _decode(autoregressive, 'block_verification')
  prompt = _batch(WAYS, 0)
  expected = plain(params, key, prompt)
  found = _decode(speculative, rule)(params, key, prompt)
  np.testing.assert_array_equal(found.tokens, expected.tokens)
  # Every one of them says something else.
  untold = plain(params, key, _batch([TextSettings()] * len(WAYS), 0))
  differs = (untold.tokens != expected.tokens).any(axis=1)
  assert differs.tolist() == [False, *[True] * (len(WAYS) - 1)]


@slow.parametrize(('rule',), _RULES, now=_RULES[:1])
def test_a_row_depends_on_its_own_settings_alone(rule):
  decode = _decode(speculative, rule)
  params, key = Params(PARAMS, DRAFTER_PARAMS), jax.random.key(3)
  prompt = _batch(WAYS, 1)
  together = decode(params, key, prompt)
  for row in range(len(WAYS)):
    # The same program, all of whose rows are this one.
    alone = jax.tree.map(lambda x, row=row: x[np.full(len(WAYS), row)], prompt)
    found = decode(params, key, alone)
    np.testing.assert_array_equal(found.tokens[0], together.tokens[row])


@pytest.mark.slow
@pytest.mark.parametrize('num_ids', [None, V - 1])
@pytest.mark.parametrize('temperature', [0, 1])
def test_a_row_to_which_no_token_is_left_ends_as_with_nan(temperature, num_ids):
  never = [[2, token] for token in range(num_ids or V)]
  ways = [TextSettings(), TextSettings(bad_words_ids=never)]
  prompt, params = _batch(ways, temperature), Params(PARAMS, DRAFTER_PARAMS)
  for loop in (autoregressive, speculative):
    decode = _decode(loop, 'block_verification', num_ids)
    found = decode(params, jax.random.key(0), prompt)
    assert found.has_nan.tolist() == [False, True]
    assert found.lengths.tolist() == [MAX_LEN, prompt.decoder_lengths[1]]


def test_padding_is_no_token_that_is_left(tmp_path):
  num_ids = len(tiny.make_tokens())
  folder = tiny.write_model(tmp_path / 'padded', vocab_size=num_ids + 7)
  decoder = specdec_jax.load(folder, drafter='prompt_lookup', gamma=2)
  # What comes is 5, and after it nothing may.
  once = {
    'no_repeat_ngram_size': 1,
    'min_new_tokens': 4,
    'suppress_tokens': [i for i in range(num_ids) if i not in (5, 2)],
  }
  for each in (decoder, decoder.at(0)):
    texts = specdec_jax.generate(each, ['in'], max_new_tokens=6, **once)
    with pytest.raises(ValueError, match=r'after 1 new tokens .* no token'):
      next(texts)


@slow.parametrize(('rule',), _RULES, now=_RULES[:1])
def test_drafts_are_processed_as_well(rule):
  """A model that drafts for itself is always right, whatever it is told."""
  decode = _decode(speculative, rule)
  params = Params(PARAMS, PARAMS)
  found = decode(params, jax.random.key(0), _batch(WAYS, 1)).statistics
  accepted = np.sum(found.num_accepted, axis=1)
  assert (accepted > 0).all()
  if rule == 'block_verification':
    np.testing.assert_array_equal(accepted, np.sum(found.num_tested, axis=1))


def test_what_nobody_asks_for_is_not_in_the_program(monkeypatch):
  neutral = TextSettings(
    repetition_penalty=1.0, presence_penalty=0, no_repeat_ngram_size=0
  )
  assert _batch([neutral, TextSettings()], 1).processors is None

  def fail(*args):
    raise AssertionError('it was traced')

  prompt = toy.prompt([[1], [0, 2]])
  params, key = Params(PARAMS, DRAFTER_PARAMS), jax.random.key(0)
  monkeypatch.setattr(processors, '_process', fail)
  for loop in (autoregressive, speculative):
    decode = _decode(loop, 'speculative_sampling')
    decode.trace(params, key, prompt)
    with pytest.raises(AssertionError, match='traced'):
      decode.trace(params, key, _batch(WAYS[:2], 1))


def _golden():
  path = pathlib.Path(__file__).parents[1] / 'golden' / 'processors.json'
  return json.loads(path.read_text())


def test_the_formulas_and_their_order_are_those_of_transformers():
  """All of its cases, single processors and pairs of them, as rows of one
  batch, each with settings of its own."""
  cases = _golden()
  vocab_size = len(cases[0]['logits'])
  width = max(len(case['text']) for case in cases) + 2
  # What lies behind a text must not matter.
  tokens = np.full((len(cases), width), 1, np.int32)
  for row, case in zip(tokens, cases, strict=True):
    row[: len(case['text'])] = case['text']
  starts = np.array([case['start'] for case in cases], np.int32)
  prompt = Prompt(
    encoder_tokens=None,
    decoder_tokens=tokens,
    decoder_lengths=starts,
    row_ids=starts,
    max_lengths=starts
    + np.array([case['most_new'] for case in cases], np.int32),
  )
  text = Context(
    tokens=tokens,
    lengths=np.array([len(case['text']) for case in cases], np.int32),
    starts=starts,
    processors=_told(
      [TextSettings(**case['settings']) for case in cases],
      prompt,
      eos_ids=(2,),
      vocab_size=vocab_size,
    ).processors,
  )
  given = np.array([case['logits'] for case in cases], np.float32)
  found = jax.jit(processors.after_text)(given, text)
  nothing = lambda x: -math.inf if x is None else x
  expected = [list(map(nothing, case['processed'])) for case in cases]
  np.testing.assert_allclose(found, expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(
  'forced', [{'forced_bos_token_id': 2}, {'forced_eos_token_id': [2, 1]}]
)
def test_ids_that_are_forced_and_suppressed_are_refused(forced):
  [name] = forced
  with pytest.raises(ValueError, match=rf'{name} forces .*, which suppress_'):
    TextSettings(**forced, suppress_tokens=[1, 2])
  TextSettings(**forced, suppress_tokens=[1, 3])


def test_no_token_is_left_where_the_first_is_forced_and_suppressed_first():
  way = TextSettings(forced_eos_token_id=EOS, begin_suppress_tokens=[EOS])
  for num_new, left in ((1, []), (2, [0, 1, 2])):
    prompt = toy.prompt([[1, 2]], max_lengths=[2 + num_new])
    text = Context(
      tokens=jnp.pad(prompt.decoder_tokens, ((0, 0), (0, 2))),
      lengths=prompt.decoder_lengths,
      starts=prompt.decoder_lengths,
      processors=_told([way], prompt).processors,
    )
    after = processors.after_text(jnp.zeros((1, V)), text)
    assert np.flatnonzero(np.isfinite(after[0])).tolist() == left


def test_of_a_files_least_lengths_the_one_of_new_tokens_counts(tmp_path):
  stated = {'min_length': 9, 'min_new_tokens': 0}
  path = tmp_path / 'generation_config.json'
  path.write_text(json.dumps(stated))
  assert generation_config.stated(tmp_path)[1] == {}
  path.write_text(json.dumps(stated | {'min_new_tokens': None}))
  assert generation_config.stated(tmp_path)[1] == {'min_length': 9}
