"""Texts that match a grammar: masks for every position of a block and a tree,
and drafts of what a grammar leaves to say."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specdec_jax import drafters, verification
from specdec_jax.base import Params, Sampling
from specdec_jax.decoding import autoregressive, exact_bits, speculative
from specdec_jax.decoding.method import Method
from specdec_jax.models.drafting import draft_vocabulary
from specdec_jax.sampling import grammars, logits
from specdec_jax.text import grammars as readers
from tests import slow, toy, toy_eagle, toy_grammar, toy_tree, trial

pytest.importorskip('llguidance')
pytest.importorskip('tokenizers')

V, EOS = toy_grammar.V, toy_grammar.EOS
TARGET, PARAMS = toy.toy(V), toy.toy_params(V, seed=1)
DRAFTER_PARAMS = toy.perturb(PARAMS, seed=2)
# By prompt. The third row may say anything; the second grammar counts.
ROWS = {
  (1,): 'start: /a[ab]*b|b/',
  (0, 2): 'start: "a" start "b" | "b" "a"?',
  (2, 1, 0): None,
  (1, 1, 2): 'start: /(ab){2}a*|a(ba)*/',
}
# A drafter and the rule of its drafts.
SETTINGS = {
  'chain': 'speculative_sampling',
  'short chain': 'speculative_sampling',
  'block': 'block_verification',
  'short block': 'block_verification',
  'grammar': 'speculative_sampling',
  'copies': 'speculative_sampling',
  'tree': 'traversal',
  'words': 'speculative_sampling',
}


# A drafter's words; behind some texts the grammars allow none of them.
_WORDS = np.array([1])


def _of_words(params, *args, **options):
  scores, cache = TARGET.extend(params, *args, **options)
  return draft_vocabulary.spread(scores[..., _WORDS], _WORDS, V), cache


def _drafter(name: str):
  to_probs = logits.standardize()
  silent = drafters.none(3)._replace(may_abstain=True, takes_guesses=True)
  make = {
    'tree': lambda: drafters.branching(
      TARGET, tree=toy_tree.BENT, logits_to_probs=to_probs
    ),
    'short': lambda: drafters.adaptive(
      TARGET, gamma=3, logits_to_probs=to_probs, min_prob=0.4
    ),
    'grammar': lambda: silent,
    'copies': lambda: drafters.prompt_lookup(gamma=3, min_ngram=1),
    'words': lambda: drafters.autoregressive(
      TARGET._replace(extend=_of_words), gamma=3, logits_to_probs=to_probs
    ),
  }
  chain = lambda: drafters.autoregressive(
    TARGET, gamma=3, logits_to_probs=to_probs
  )
  return make.get(name.split()[0], chain)()


def _rule(name: str):
  if name == 'tree':
    return toy_tree.rule(SETTINGS[name], toy_tree.BENT)
  return getattr(verification, SETTINGS.get(name, 'speculative_sampling'))


@functools.cache
def _eagle():
  """A target whose states an EAGLE-3 drafter reads, and that drafter."""
  target, network = toy_eagle.counting(V, gamma=3, num_drafted=V)
  drafter = drafters.autoregressive(
    drafters.eagle(network), gamma=3, logits_to_probs=logits.standardize()
  )
  return target, drafter


def _trial(name: str) -> trial.Trial:
  target, drafter = _eagle() if name == 'eagle' else (TARGET, _drafter(name))
  return trial.Trial(
    target=target,
    params=Params(PARAMS, DRAFTER_PARAMS),
    drafter=drafter,
    verify_fn=_rule(name),
    prompts=tuple(ROWS),
    num_new=(4,) * len(ROWS),
    eos_id=EOS,
    grammars=tuple(ROWS.values()),
  )


@pytest.mark.slow
@pytest.mark.parametrize('name', [*SETTINGS, 'eagle'])
def test_blocks_and_trees_have_plain_decodings_distribution(
  name, record_property
):
  result = trial.check(
    _trial(name),
    record_property,
    'Grammars through the compiled loop, false alarm rate 1e-9',
    f'four rows of other grammars, {name}',
    num_decodes=100_800,
  )
  assert np.sum(result.statistics.num_accepted) > 0


def _previous(masks):
  """Masks of the position before each."""
  return jnp.concatenate([masks[:, :1], masks[:, :-1]], axis=1)


def _late(monkeypatch, name: str) -> trial.Trial:
  """Rules out tokens once p is formed."""
  late = []

  def keep(logits, masks):
    late.append(masks)
    return logits

  monkeypatch.setattr(grammars, 'masked', keep)
  given = _trial(name)

  def verify(row_keys, draft, target_probs):
    may_come = _MASKED(jnp.zeros_like(target_probs), late[-1]) == 0
    return given.verify_fn(
      row_keys, draft, jnp.where(may_come, target_probs, 0)
    )

  return given._replace(verify_fn=verify)


_MASKED = grammars.masked
_AFTER = readers.Reader._after


def _one_token_further(reader, name, number, text):
  """A matcher that has read the first token that may come as well, if it is of
  a text that the row has had an iteration before."""
  is_first = name not in reader._of_rows
  matcher = _AFTER(reader, name, number, text)
  if matcher is not None and not is_first:
    mask = np.frombuffer(matcher.compute_bitmask(), np.uint8)
    token = int(np.unpackbits(mask, bitorder='little').argmax())
    matcher.try_consume_tokens([token])
  return matcher


@pytest.mark.slow
@pytest.mark.parametrize('name', ['chain', 'block', 'tree', 'copies', 'eagle'])
@pytest.mark.parametrize('variant', ['previous', 'late', 'not rolled back'])
def test_masks_of_other_states_are_noticed(name, variant, monkeypatch):
  given = _trial(name)
  if variant == 'previous':
    monkeypatch.setattr(
      grammars,
      'masked',
      lambda logits, masks: _MASKED(logits, _previous(masks)),
    )
  elif variant == 'late':
    given = _late(monkeypatch, name)
  else:
    monkeypatch.setattr(readers.Reader, '_after', _one_token_further)
  jax.clear_caches()
  report = trial.run(given, num_decodes=50_400, batch_size=12_600).report
  # No other test is to have what this reader keeps.
  readers.reader_of.cache_clear()
  assert report.verdict == 'REJECTED'


@pytest.mark.slow
def test_tokens_that_are_left_out_for_what_they_are_are_noticed(monkeypatch):
  """A drawn token that may not come has to stay: it is no draw from q else."""
  run = lambda: (
    trial.run(
      _trial('chain'), num_decodes=50_400, batch_size=12_600
    ).report.verdict
  )
  assert run() == 'not rejected'
  whole = readers.Reader._completed
  monkeypatch.setattr(
    readers.Reader,
    '_completed',
    lambda *args, is_certain, **more: whole(*args, is_certain=True, **more),
  )
  jax.clear_caches()
  assert run() == 'REJECTED'


def _told(grammars_of_rows, temperature: float):
  rows = [[1, 2, 1][: 1 + i % 3] for i in range(len(grammars_of_rows))]
  every = lambda value, dtype: jnp.full(len(rows), value, dtype)
  sampling = Sampling(
    temperature=every(temperature, jnp.float32),
    top_k=every(V, jnp.int32),
    top_p=every(1, jnp.float32),
    min_p=every(0, jnp.float32),
    typical_p=every(1, jnp.float32),
  )
  grammar = toy_grammar.of_rows(*grammars_of_rows)
  return toy.prompt(rows).replace(grammar=grammar, sampling=sampling)


GRAMMARS = [*ROWS.values()]
MAX_LEN = 14


@functools.cache
def _decode(loop, name: str, change=lambda method: method):
  method = Method(
    target=TARGET,
    drafter=_drafter(name),
    verify_fn=_rule(name),
    logits_to_probs=logits.standardize(),
    eos_id=EOS,
  )
  method = change(method)
  decode = functools.partial(loop.generate, method=method, max_len=MAX_LEN)
  return jax.jit(decode)


def _by_hand(grammar: str | None, prompt: list[int]) -> list[int]:
  """Greedy tokens of the loop that every engine has on its host."""
  table, text, new = np.asarray(PARAMS['table']), [V, *prompt], []
  while len(text) - 1 < MAX_LEN and (not new or new[-1] != EOS):
    scores = table[text[-2], text[-1]].copy()
    scores[~toy_grammar.may_come(grammar, tuple(new))] = -np.inf
    new.append(int(np.argmax(scores)))
    text.append(new[-1])
  return text[1:]


@slow.parametrize(
  ('name',), [(name,) for name in SETTINGS], now=[('copies',), ('tree',)]
)
def test_greedy_tokens_are_those_of_a_loop_on_the_host(name):
  params, key = Params(PARAMS, DRAFTER_PARAMS), jax.random.key(0)
  prompt = _told(GRAMMARS, 0)
  for loop in (autoregressive, speculative):
    output = _decode(loop, name)(params, key, prompt)
    for row, grammar in enumerate(GRAMMARS):
      start = prompt.decoder_lengths[row]
      expected = _by_hand(grammar, prompt.decoder_tokens[row, :start].tolist())
      assert output.tokens[row, : output.lengths[row]].tolist() == expected


@slow.parametrize(
  ('name',), [('chain',), ('tree',), ('copies',)], now=[('chain',)]
)
def test_a_row_depends_on_its_own_grammar_alone(name):
  decode = _decode(speculative, name)
  params, key = Params(PARAMS, DRAFTER_PARAMS), jax.random.key(3)
  prompt = _told(GRAMMARS, 1)
  together = decode(params, key, prompt)
  for row in range(len(GRAMMARS)):
    # The same program, all of whose rows are this one.
    alone = jax.tree.map(
      lambda x, row=row: x[np.full(len(GRAMMARS), row)], prompt
    )
    output = decode(params, key, alone)
    np.testing.assert_array_equal(output.tokens[0], together.tokens[row])


def _forced(name: str, change=lambda method: method):
  """Decodes a grammar of one text alone: ab, ab, and so on."""
  output = _decode(speculative, name, change)(
    Params(PARAMS, DRAFTER_PARAMS),
    jax.random.key(5),
    _told(['start: /(ab){12}/'], 1),
  )
  assert output.tokens[0, 1:].tolist() == [2] * 12 + [EOS]
  return output.statistics


def test_what_is_forced_is_accepted():
  """A grammar of one text alone is decoded in as few runs as it has blocks."""
  counts = _forced('grammar')
  assert counts.num_target_runs.tolist() == [4]
  assert counts.num_accepted[0].tolist() == [4, 3, 3]


@pytest.mark.parametrize(
  'change',
  [
    lambda method: exact_bits.plain(exact_bits.of_one_width(method)),
    lambda method: dataclasses.replace(method, drafter=drafters.none(3)),
  ],
  ids=['at(0)', 'none'],
)
def test_plain_decoding_of_one_width_drafts_no_guess(change):
  counts = _forced('copies', change=change)
  assert counts.num_drafted.tolist() == [0]
  assert counts.num_target_runs.tolist() == counts.num_tokens.tolist() == [13]


def test_a_program_without_a_grammar_has_nothing_of_it():
  prompt = toy.prompt([[1], [0, 2]])
  params, key = Params(PARAMS, DRAFTER_PARAMS), jax.random.key(0)
  for loop in (autoregressive, speculative):
    decode = _decode(loop, 'chain')
    lowered = [
      decode.lower(params, key, each).as_text()
      for each in (prompt, _told(GRAMMARS[:2], 1).replace(sampling=None))
    ]
    assert ['callback' in text for text in lowered] == [False, True]
