"""Texts that match a grammar: masks for every position of a block and a tree,
and drafts of what a grammar leaves to say."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specdec_jax import drafters, verification
from specdec_jax.base import Grammar, Params, Sampling
from specdec_jax.decoding import autoregressive, exact_bits, speculative
from specdec_jax.decoding.method import Method
from specdec_jax.models.drafting import draft_vocabulary
from specdec_jax.sampling import grammars, logits
from tests import slow, toy, toy_tree, trial

V, EOS = 4, 3
TARGET, PARAMS = toy.toy(V), toy.toy_params(V, seed=1)
DRAFTER_PARAMS = toy.perturb(PARAMS, seed=2)
# By state from 1 on: the state behind each token, and where one text alone may
# come, its token. Row 3 may say anything.
ROWS = {
  (1,): (
    [{0: 2, 1: 2, 2: 3}, {1: 1, 2: 3}, {EOS: 4}, {EOS: 4}],
    {3: EOS},
  ),
  (0, 2): (
    [{1: 2}, {0: 3}, {0: 1, 1: 3, EOS: 4}, {EOS: 4}],
    {1: 1, 2: 0},
  ),
  (2, 1, 0): ([], {}),
  (1, 1, 2): ([{0: 1, 1: 2, 2: 1}, {2: 1, EOS: 3}, {EOS: 3}], {2: 2}),
}


def _grammar(ways) -> Grammar:
  """Tables of rows, with a class for each token but two that come nowhere."""
  tables = np.zeros((len(ways), 5, V + 1), np.uint16)
  guesses = np.full((len(ways), 5), -1, np.int32)
  for row, (steps, own) in enumerate(ways):
    for state, behind in enumerate(steps, start=1):
      for token, after in behind.items():
        tables[row, state, V - token] = after
    for state, token in own.items():
      guesses[row, state] = token
  return Grammar(
    classes=np.tile(np.arange(V, 0, -1, dtype=np.uint16), (len(ways), 1)),
    next=tables,
    guesses=guesses,
    states=np.array([bool(steps) for steps, _ in ways], np.int32),
  )


OF_PROMPTS = _grammar([*ROWS.values()])
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
  return getattr(verification, SETTINGS[name])


def _trial(name: str) -> trial.Trial:
  return trial.Trial(
    target=TARGET,
    params=Params(PARAMS, DRAFTER_PARAMS),
    drafter=_drafter(name),
    verify_fn=_rule(name),
    prompts=tuple(ROWS),
    num_new=(4,) * len(ROWS),
    eos_id=EOS,
    grammar=OF_PROMPTS,
  )


@slow.parametrize(
  ('name',),
  [(name,) for name in SETTINGS],
  now=[('short block',), ('tree',), ('words',)],
)
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


@pytest.mark.slow
@pytest.mark.parametrize(
  ('name', 'variant'),
  [
    *(('chain', x) for x in ('blind', 'previous')),
    *(('block', x) for x in ('blind', 'previous')),
    *(('tree', x) for x in ('blind', 'previous')),
    ('copies', 'previous'),
  ],
)
def test_masks_of_other_states_are_noticed(name, variant, monkeypatch):
  whole = grammars._masked
  # States as if nothing were drafted, or all but the last token.
  seen = {
    'blind': lambda states: jnp.repeat(states[:, :1], states.shape[1], axis=1),
    'previous': lambda states: jnp.concatenate(
      [states[:, :1], states[:, :-1]], axis=1
    ),
  }[variant]
  monkeypatch.setattr(
    grammars,
    '_masked',
    lambda logits, grammar, states: whole(logits, grammar, seen(states)),
  )
  jax.clear_caches()
  report = trial.run(
    _trial(name), num_decodes=100_800, batch_size=25_200
  ).report
  assert report.verdict == 'REJECTED'


@pytest.mark.slow
def test_guesses_that_depend_on_what_is_drawn_are_noticed(monkeypatch):
  """Where a token may not come, a guess in its place is no draw from q."""
  whole = grammars.guided

  def swayed(draft, grammar, tree):
    blind = draft.replace(probs=None)
    return whole(blind, grammar, tree).replace(probs=draft.probs)

  # Its drafter knows of no grammar.
  plain = drafters.autoregressive(
    TARGET, gamma=3, logits_to_probs=logits.standardize()
  )

  def propose(params, row_keys, context, state):
    return plain.propose(params, row_keys, context.replace(grammar=None), state)

  unaware = plain._replace(propose=propose)
  run = lambda: (
    trial.run(
      _trial('chain')._replace(drafter=unaware),
      num_decodes=100_800,
      batch_size=25_200,
    ).report.verdict
  )
  assert run() == 'not rejected'
  monkeypatch.setattr(grammars, 'guided', swayed)
  jax.clear_caches()
  assert run() == 'REJECTED'


def _told(ways, temperature: float, num_rows: int | None = None):
  rows = [[1, 2, 1][: 1 + i % 3] for i in range(len(ways))]
  every = lambda value, kind: jnp.full(len(rows), value, kind)
  sampling = Sampling(
    temperature=every(temperature, jnp.float32),
    top_k=every(V, jnp.int32),
    top_p=every(1, jnp.float32),
    min_p=every(0, jnp.float32),
    typical_p=every(1, jnp.float32),
  )
  return toy.prompt(rows).replace(grammar=_grammar(ways), sampling=sampling)


WAYS = [*ROWS.values()]
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


def _by_hand(way, prompt: list[int]) -> list[int]:
  """Greedy tokens of the loop that every engine has on its host."""
  steps, _ = way
  table, text = np.asarray(PARAMS['table']), [V, *prompt]
  state = 1 if steps else 0
  while len(text) - 1 < MAX_LEN and (text[-1] != EOS or len(text) == 2):
    own = table[text[-2], text[-1]].copy()
    if state:
      own[[x for x in range(V) if x not in steps[state - 1]]] = -np.inf
    text.append(int(np.argmax(own)))
    if state:
      state = steps[state - 1][text[-1]]
  return text[1:]


@slow.parametrize(
  ('name',), [(name,) for name in SETTINGS], now=[('copies',), ('tree',)]
)
def test_greedy_tokens_are_those_of_a_loop_on_the_host(name):
  params, key = Params(PARAMS, DRAFTER_PARAMS), jax.random.key(0)
  prompt = _told(WAYS, 0)
  for loop in (autoregressive, speculative):
    found = _decode(loop, name)(params, key, prompt)
    for row, way in enumerate(WAYS):
      start = prompt.decoder_lengths[row]
      expected = _by_hand(way, prompt.decoder_tokens[row, :start].tolist())
      assert found.tokens[row, : found.lengths[row]].tolist() == expected


@slow.parametrize(
  ('name',), [('chain',), ('tree',), ('copies',)], now=[('chain',)]
)
def test_a_row_depends_on_its_own_grammar_alone(name):
  decode = _decode(speculative, name)
  params, key = Params(PARAMS, DRAFTER_PARAMS), jax.random.key(3)
  prompt = _told(WAYS, 1)
  together = decode(params, key, prompt)
  for row in range(len(WAYS)):
    # The same program, all of whose rows are this one.
    alone = jax.tree.map(lambda x, row=row: x[np.full(len(WAYS), row)], prompt)
    found = decode(params, key, alone)
    np.testing.assert_array_equal(found.tokens[0], together.tokens[row])


def _forced(name: str, change=lambda method: method):
  """Decodes a grammar of one text alone: 1, 0, 0, 1, 1, ..."""
  # Of five states, the last repeats.
  way = [{1: 2}, {0: 3}, {0: 4}, {1: 4}], {1: 1, 2: 0, 3: 0, 4: 1}
  found = _decode(speculative, name, change)(
    Params(PARAMS, DRAFTER_PARAMS), jax.random.key(5), _told([way], 1)
  )
  assert found.tokens[0, 1:].tolist() == [1, 0, 0, *[1] * 10]
  return found.statistics


def test_what_is_forced_is_accepted():
  """A grammar of one text alone is decoded in as few runs as it has blocks."""
  found = _forced('grammar')
  assert found.num_target_runs.tolist() == [4]
  assert found.num_accepted[0].tolist() == [4, 3, 3]


@pytest.mark.parametrize(
  'change',
  [
    lambda made: exact_bits.plain(exact_bits.of_one_width(made)),
    lambda made: dataclasses.replace(made, drafter=drafters.none(3)),
  ],
  ids=['at(0)', 'none'],
)
def test_plain_decoding_of_one_width_drafts_no_guess(change):
  found = _forced('copies', change=change)
  assert found.num_drafted.tolist() == [0]
  assert found.num_target_runs.tolist() == found.num_tokens.tolist() == [13]


def test_a_program_without_a_grammar_has_nothing_of_it(monkeypatch):
  def fail(*args):
    raise AssertionError('it was traced')

  prompt = toy.prompt([[1], [0, 2]])
  params, key = Params(PARAMS, DRAFTER_PARAMS), jax.random.key(0)
  monkeypatch.setattr(grammars, '_step', fail)
  monkeypatch.setattr(grammars, '_masked', fail)
  for loop in (autoregressive, speculative):
    decode = _decode(loop, 'chain')
    decode.trace(params, key, prompt)
    with pytest.raises(AssertionError, match='traced'):
      decode.trace(params, key, _told(WAYS[:2], 1))
