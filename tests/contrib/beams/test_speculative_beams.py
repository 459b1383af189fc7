"""Speculative beam search is beam search, whatever is drafted."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments.beams import plain as reordering
from specdec_jax.assembly import packed_settings
from specdec_jax.assembly.text_settings import TextSettings
from specdec_jax.base import Params
from specdec_jax.contrib.beams import beam_drafters as beams
from specdec_jax.contrib.beams import beam_trie, speculative_beams
from specdec_jax.contrib.beams.beam_trie import BeamDraft, BeamDrafter
from tests import broken, slow, toy
from tests.contracts import table_of_models as models

V, MAX_LEN, EOS = 8, 13, 1
GAMMA = 3
TOY = toy.toy(V)
PROMPTS = [[0], [0, 2, 3, 2], [4, 2, 3], [0, 2], [5, 6, 5, 6, 5]]
LIMITS = [13, 12, 9, 4, 13]
# Beams, alpha, and ids that end a sequence.
SEARCHES = [(1, 0.0, (1, 3)), (2, 0.6, EOS), (4, 0.0, EOS), (5, 0.6, (1, 3))]


def prompt_of(rows=None, limits=LIMITS):
  return toy.prompt(rows or PROMPTS, max_lengths=limits)


@functools.cache
def program(generate, **settings):
  """One compiled program per kind of search, whoever asks."""
  return jax.jit(functools.partial(generate, **settings))


def plain(params, prompt, model=TOY, **settings):
  settings = {'max_len': MAX_LEN, 'eos_id': EOS} | settings
  run = program(reordering.generate, target=model, **settings)
  return jax.tree.map(np.asarray, run(Params(params), prompt))


def fast(params, prompt, drafter, model=TOY, **settings):
  """`params` are `Params`, or the target's."""
  params = params if isinstance(params, Params) else Params(params)
  settings = {'max_len': MAX_LEN, 'eos_id': EOS} | settings
  run = program(
    speculative_beams.generate, target=model, drafter=drafter, **settings
  )
  return jax.tree.map(np.asarray, run(params, prompt))


@functools.cache
def of_model(num_beams: int, eos_id=EOS, model=TOY, width=None) -> BeamDrafter:
  width = width or 2 * num_beams
  return beams.of_model(model, gamma=GAMMA, width=width, eos_id=eos_id)


@functools.cache
def copied(num_beams: int) -> BeamDrafter:
  return beams.copied(num_beams, gamma=GAMMA, min_ngram=1)


@functools.cache
def scattered(num_beams: int, width: int) -> BeamDrafter:
  """Nodes at random, some of them absent, and some twice."""

  def propose(params, live, state):
    keys = jax.random.split(jax.random.key(jnp.sum(live.search.lengths)))
    shape = (live.search.lengths.size, GAMMA, width)
    above = jnp.array([num_beams] + [width] * (GAMMA - 1), jnp.int32)
    parents = jax.random.randint(
      keys[0], shape, -1, above[None, :, None], jnp.int32
    )
    tokens = jax.random.randint(keys[1], shape, 0, V, jnp.int32)
    return BeamDraft(tokens=tokens, parents=parents), state

  return beams.none(width)._replace(gamma=GAMMA, propose=propose)


def same(found, expected) -> bool:
  """Whether two outputs are one."""
  for name in ('tokens', 'lengths', 'is_finished', 'has_nan'):
    if not np.array_equal(getattr(found, name), getattr(expected, name)):
      return False
  return np.allclose(found.scores, expected.scores, rtol=1e-6, atol=1e-5)


def assert_same(found, expected):
  for name in ('tokens', 'lengths', 'is_finished', 'has_nan'):
    np.testing.assert_array_equal(
      getattr(found, name), getattr(expected, name), name
    )
  np.testing.assert_allclose(
    found.scores, expected.scores, rtol=1e-6, atol=1e-5
  )
  # A step is the first of a call, or a level that was followed.
  counts = found.statistics
  np.testing.assert_array_equal(
    counts.num_target_runs + counts.num_accepted.sum(axis=1),
    expected.statistics.num_target_runs,
  )
  np.testing.assert_array_equal(
    counts.num_tokens, expected.statistics.num_tokens
  )
  assert (counts.num_accepted <= counts.num_tested).all()


@slow.parametrize(('num_beams', 'alpha', 'eos_id'), SEARCHES, now=[SEARCHES[2]])
@pytest.mark.parametrize('kind', ['none', 'model', 'copied', 'scattered'])
def test_every_draft_gives_the_beams_of_beam_search(
  kind, num_beams, alpha, eos_id
):
  drafter = {
    'none': beams.none,
    'model': lambda num_beams: of_model(num_beams, eos_id),
    'copied': copied,
    'scattered': lambda num_beams: scattered(num_beams, 2 * num_beams),
  }[kind](num_beams)
  settings = {'num_beams': num_beams, 'alpha': alpha, 'eos_id': eos_id}
  prompt, saved = prompt_of(), 0
  for seed in range(6):
    params = toy.toy_params(V, seed=seed)
    expected = plain(params, prompt, **settings)
    weights = Params(params, toy.perturb(params, seed=seed, scale=0.4))
    found = fast(weights, prompt, drafter, **settings)
    assert_same(found, expected)
    saved += found.statistics.num_accepted.sum()
  if kind == 'model':
    assert saved > 20


@pytest.mark.slow
def test_beams_that_are_processed_are_the_same():
  prompt, settings = prompt_of(), {'num_beams': 2, 'alpha': 0.6}
  way = TextSettings(presence_penalty=1.5, no_repeat_ngram_size=2)
  process = packed_settings.packer(
    [way, TextSettings(min_new_tokens=4)], eos_ids=(EOS,), vocab_size=V
  )
  told = process([0, 1, 0], prompt)
  params = toy.toy_params(V, seed=0)
  found = fast(params, told, copied(2), **settings)
  assert_same(found, plain(params, told, **settings))
  assert not same(found, plain(params, prompt, **settings))


# One call of the smallest width does for all.
none = functools.cache(beams.none)


@pytest.mark.slow
@pytest.mark.parametrize('num_beams', [1, 4])
def test_a_perfect_draft_saves_all_calls_that_can_be_saved(num_beams):
  """The levels are as wide as the beam: they are the live sequences."""
  settings = {'num_beams': num_beams, 'alpha': 0.6}
  prompt = prompt_of()
  drafter = of_model(num_beams, width=num_beams)
  for seed in range(3):
    params = toy.toy_params(V, seed=seed)
    expected = plain(params, prompt, **settings)
    found = fast(Params(params, params), prompt, drafter, **settings)
    assert_same(found, expected)
    np.testing.assert_array_equal(
      found.statistics.num_target_runs,
      -(-expected.statistics.num_target_runs // (GAMMA + 1)),
    )


def repeating() -> dict:
  """After 0 one of two cycles begins, and goes on or ends."""
  table = np.full((V + 1, V, V), -30.0)
  table[:, 0, [2, 5]] = np.log([0.6, 0.4])
  for cycle in ((2, 3, 4), (5, 6, 7)):
    for i, token in enumerate(cycle):
      table[:, token, cycle[(i + 1) % 3]] = 0.0
      table[:, token, EOS] = -4.0
  return {'table': jnp.asarray(table, jnp.float32)}


@pytest.mark.slow
def test_copies_save_calls_where_text_repeats():
  rows = [[2, 3, 4, 2, 3, 5, 6, 7, 5, 6, 0], [0]]
  prompt = toy.prompt(rows, max_lengths=[20, 12])
  settings = {'num_beams': 2, 'max_len': 20}
  expected = plain(repeating(), prompt, **settings)
  found = fast(repeating(), prompt, copied(2), **settings)
  assert_same(found, expected)
  runs = found.statistics.num_target_runs
  assert runs[0] < expected.statistics.num_target_runs[0]


def with_nan(*paths) -> dict:
  """A toy in which logits after some pairs of tokens are no numbers."""
  table = np.array(toy.toy_params(V, seed=4)['table'])
  for before, last in paths:
    table[before, last] = np.nan
  return {'table': jnp.asarray(table)}


@pytest.mark.slow
@pytest.mark.parametrize('num_beams', [1, 4])
def test_not_a_number_stops_its_row_at_the_same_step(num_beams):
  prompt, settings = prompt_of(), {'num_beams': num_beams, 'alpha': 0.6}
  expected = plain(toy.toy_params(V, seed=4), prompt, **settings)
  seen = set()
  # Pairs that the best sequences of some rows reach at different depths.
  for row, length in enumerate(expected.lengths[:, -1]):
    best = expected.tokens[row, -1].tolist()
    seen |= {(best[i - 1], best[i]) for i in range(1, length)}
  stopped = []
  for pair in sorted(seen)[:8]:
    params = with_nan(pair)
    expected = plain(params, prompt, **settings)
    for drafter, own in (
      (of_model(num_beams), toy.toy_params(V, seed=4)),
      (of_model(num_beams), params),
    ):
      found = fast(Params(params, own), prompt, drafter, **settings)
      assert_same(found, expected)
    stopped.append(int(expected.has_nan.sum()))
  assert sum(stopped) > 0
  assert min(stopped) < len(PROMPTS)


NETWORKS = [
  *('llama, later', 'T5 1.1', 'T5Gemma'),
  *('llama, later, int8 cache', 'T5 1.1, int8 cache'),
]


@pytest.mark.slow
@pytest.mark.parametrize('name', NETWORKS)
def test_every_network(name):
  """With real attention: entries of the prompt, of steps and of drafts."""
  model, make_params = models.ROWS[name]
  params = make_params()
  own = toy.perturb(params, seed=1, scale=0.1)
  rows = [[0]] * 5 if name in models.HAS_ENCODER else None
  limits = [14, 9, 14, 8, 12]
  prompt = models.prompt_of(name, rows, width=7, max_lengths=limits)
  settings = {'num_beams': 4, 'max_len': 14, 'model': model}
  expected = plain(params, prompt, **settings)
  drafter = of_model(4, model=model)
  found = fast(Params(params, own), prompt, drafter, **settings)
  assert_same(found, expected)
  assert found.statistics.num_accepted.sum() > 0
  alone = fast(params, prompt, none(4), **settings)
  assert_same(alone, expected)


@pytest.mark.slow
def test_less_capacity_where_few_tokens_are_new():
  rows = [[2, 3] * 6, [4], [5, 6, 7]]
  limited = toy.prompt(rows, max_lengths=[len(row) + 4 for row in rows])
  params, settings = toy.toy_params(V, seed=2), {'num_beams': 4, 'max_len': 16}
  expected = plain(params, limited, **settings)
  drafter = of_model(4)
  found = fast(
    Params(params, params), toy.prompt(rows), drafter, max_new_tokens=4,
    **settings,
  )  # fmt: skip
  assert_same(found, expected)
  capacity = functools.partial(
    beam_trie.capacity, 4, drafter, max_len=16, prompt_len=12
  )
  assert capacity(max_new_tokens=4) == 12 + 4 * 5 + GAMMA * 8
  assert capacity(max_new_tokens=None) == 4 * 16 + GAMMA * 8


def differs(drafter=None, model=TOY) -> bool:
  """Whether a search is not beam search, for some of ten chains; compiled
  afresh, as something in it was replaced."""
  settings = {'num_beams': 3, 'max_len': MAX_LEN, 'eos_id': EOS}
  drafter = drafter or beams.of_model(TOY, gamma=GAMMA, width=4, eos_id=EOS)
  run = jax.jit(
    functools.partial(
      speculative_beams.generate, target=model, drafter=drafter, **settings
    )
  )
  prompt, found = prompt_of(), []
  for seed in range(10):
    params = toy.toy_params(V, seed=seed)
    weights = Params(params, toy.perturb(params, seed=seed, scale=0.4))
    output = jax.tree.map(np.asarray, run(weights, prompt))
    found.append(same(output, plain(params, prompt, num_beams=3)))
  return not all(found)


@pytest.mark.slow
def test_what_is_right_does_not_differ():
  assert not differs()


@pytest.mark.slow
def test_a_replay_that_goes_on_without_a_live_sequence_is_seen(monkeypatch):
  """The sequence that was not drafted is taken for some node that was."""
  find = speculative_beams._find

  def found(draft, depth, parents, tokens):
    nodes, is_node = find(draft, depth, parents, tokens)
    return nodes, jnp.full_like(is_node, True) & (depth < GAMMA)

  monkeypatch.setattr(speculative_beams, '_find', found)
  assert differs()


@pytest.mark.slow
def test_a_replay_that_looks_at_tokens_alone_is_seen(monkeypatch):
  """A node of another parent has the same token."""
  find = speculative_beams._find

  def found(draft, depth, parents, tokens):
    same_parent = jnp.zeros_like(draft.parents)
    nodes, is_node = find(
      draft.replace(parents=same_parent), depth, parents * 0, tokens
    )
    return nodes, is_node

  monkeypatch.setattr(speculative_beams, '_find', found)
  assert differs()


@pytest.mark.slow
def test_siblings_that_are_seen_are_seen(monkeypatch):
  """Children see the entries of all nodes above, not of their own alone."""
  below = beam_trie.below

  def all_above(sees, parents, starts):
    every = jnp.any(sees, axis=1, keepdims=True)
    return below(jnp.broadcast_to(every, sees.shape), parents, starts)

  monkeypatch.setattr(beam_trie, 'below', all_above)
  assert differs()


def test_entries_of_another_beam_are_seen(monkeypatch):
  """What a live sequence sees stays where it was when its parent changed."""
  take = speculative_beams.arrays.take

  def in_place(values, indices):
    is_mask = values.dtype == jnp.bool_ and values.ndim == 3
    return values if is_mask else take(values, indices)

  monkeypatch.setattr(speculative_beams.arrays, 'take', in_place)
  assert differs(none(3))


@pytest.mark.slow
@pytest.mark.parametrize('name', broken.WITH_TREES)
def test_models_that_are_wrong_about_tries_are_seen(name):
  assert differs(model=broken.WITH_TREES[name](TOY))


WITHOUT_GATHER = TOY._replace(gather=None)


@pytest.mark.parametrize(
  ('drafter', 'settings', 'message'),
  [
    (of_model(4, width=3), {}, r'3 nodes.*4 beams'),
    (none(4), {'model': WITHOUT_GATHER}, 'takes no placements'),
    (beams.of_model(TOY, gamma=1, width=33, eos_id=EOS), {}, '33 nodes'),
    (none(4), {'alpha': -1.0}, r'alpha.*finite'),
  ],
)
def test_what_cannot_be_drafted_is_one_sentence(drafter, settings, message):
  prompt, params = toy.prompt([[0]]), toy.toy_params(V, seed=0)
  with pytest.raises(ValueError, match=message):
    fast(Params(params, params), prompt, drafter, num_beams=4, **settings)


def test_a_model_without_placements_drafts_no_beams():
  with pytest.raises(ValueError, match='takes no placements'):
    beams.of_model(WITHOUT_GATHER, gamma=1, width=4, eos_id=EOS)
