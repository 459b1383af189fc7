"""Alpha by its definition, and what is said of it."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specdec_jax import drafters, theory, verification
from specdec_jax.base import Params, Tree
from specdec_jax.contrib.top_beta.rule import top_beta
from specdec_jax.decoding import autoregressive, speculative
from specdec_jax.decoding import rates as metrics
from specdec_jax.decoding.method import Method
from specdec_jax.measure import calibration
from specdec_jax.measure.calibration import Overlaps
from specdec_jax.sampling import logits
from tests import toy

V, NUM_NEW, PROMPT = 5, 12, 3
TO_PROBS = logits.standardize(temperature=0.8)
TARGET = toy.toy(V)
PARAMS = Params(
  toy.toy_params(V, seed=1), toy.perturb(toy.toy_params(V, seed=1), seed=2)
)
DRAFTERS = {
  'model': drafters.autoregressive(TARGET, gamma=1, logits_to_probs=TO_PROBS),
  'prompt_lookup': drafters.prompt_lookup(gamma=1, min_ngram=1),
}


def prompt_of(start: int):
  rows = [[1, 2, 3], [4, 0, 2]]
  return toy.prompt(
    rows, row_ids=np.arange(start, start + 2), max_lengths=[15, 11]
  )


def measure(name: str) -> Overlaps:
  [found] = overlaps_of(DRAFTERS[name])
  return found


def overlaps_of(drafter, **options) -> list[Overlaps]:
  [found] = overlaps_of_all([drafter], **options)
  return found


def overlaps_of_all(all_drafters, **options) -> list[list[Overlaps]]:
  return calibration.overlaps(
    PARAMS._replace(drafter=[PARAMS.drafter] * len(all_drafters)),
    jax.random.key(0),
    [prompt_of(0), prompt_of(2)],
    method=Method(target=TARGET, logits_to_probs=TO_PROBS, eos_id=-1),
    drafters=all_drafters,
    max_len=PROMPT + NUM_NEW,
    num_tokens=NUM_NEW,
    **options,
  )


def next_probs(params, tokens: np.ndarray) -> np.ndarray:
  """What follows each pair of tokens, `[N, V]`."""
  raw = np.asarray(params['table'])[tokens[:-1], tokens[1:]]
  return np.asarray(TO_PROBS(jnp.asarray(raw)))


@pytest.fixture(scope='module')
def texts() -> list[np.ndarray]:
  """What the target generates plainly, a row each, prompts included."""
  found = []
  for start in (0, 2):
    output = jax.jit(
      lambda prompt: autoregressive.generate(
        PARAMS,
        jax.random.key(0),
        prompt,
        method=Method(target=TARGET, logits_to_probs=TO_PROBS, eos_id=-1),
        max_len=PROMPT + NUM_NEW,
      )
    )(prompt_of(start))
    rows = zip(output.tokens, output.lengths, strict=True)
    found += [np.asarray(row)[:length] for row, length in rows]
  return found


def test_overlaps_are_those_of_both_laws_along_the_target_s_own_text(texts):
  found = measure('model')
  assert found.is_text.sum(1).tolist() == [12, 8, 12, 8]
  np.testing.assert_array_equal(found.is_text, found.is_drafted)
  for row, tokens in enumerate(texts):
    p, q = (next_probs(side, tokens[1:-1]) for side in PARAMS)
    np.testing.assert_allclose(
      found.values[row][found.is_text[row]],
      np.minimum(p, q).sum(1),
      atol=1e-5,
    )


def test_a_drafter_without_probabilities_overlaps_by_its_token(texts):
  found = measure('prompt_lookup')
  assert 0 < found.is_drafted.sum() < found.is_text.sum()
  for row, tokens in enumerate(texts):
    for i in np.flatnonzero(found.is_drafted[row]):
      before = tokens[: PROMPT + i]
      p = next_probs(PARAMS.target, before[-2:])[0]
      # What followed the last token's latest earlier occurrence, or that of a
      # longer suffix: a token of the text before.
      assert any(
        abs(found.values[row, i] - p[token]) < 1e-5 for token in set(before)
      )


def shared_masses(leniences):
  return [
    functools.partial(calibration.shared_mass, lenience=each)
    for each in leniences
  ]


def test_leniences_are_those_of_theory_along_one_text(texts):
  leniences = (1.0, 0.5, 0.1)
  share_fns = shared_masses(leniences)
  found = overlaps_of(DRAFTERS['model'], share_fns=share_fns)
  for lenience, each in zip(leniences, found, strict=True):
    for row, tokens in enumerate(texts):
      p, q = (next_probs(side, tokens[1:-1]) for side in PARAMS)
      expected = theory.acceptance_rate(p, q, lenience)
      values = each.values[row, : len(tokens) - PROMPT]
      np.testing.assert_allclose(values, expected, atol=1e-5)


@pytest.mark.slow
def test_drafters_that_are_asked_together_answer_as_they_do_alone():
  share_fns = shared_masses((1.0, 0.5))
  together = overlaps_of_all(list(DRAFTERS.values()), share_fns=share_fns)
  for drafter, found in zip(DRAFTERS.values(), together, strict=True):
    alone = overlaps_of(drafter, share_fns=share_fns)
    for one, other in zip(found, alone, strict=True):
      jax.tree.map(np.testing.assert_array_equal, one, other)
  assert (together[0][0].values != together[1][0].values).any()


def test_argmax_leniences_follow_greedy_text():
  greedy = logits.standardize(temperature=0)
  drafter = drafters.autoregressive(TARGET, gamma=1, logits_to_probs=greedy)
  leniences = (1.0, 0.2)
  rules = [
    functools.partial(verification.greedy, lenience=each) for each in leniences
  ]
  share_fns = [
    functools.partial(calibration.passes_rule, verify_fn=rule) for rule in rules
  ]
  found = overlaps_of(drafter, share_fns=share_fns, verify_fn=rules[0])
  tokens = [1, 2, 3]
  for _ in range(NUM_NEW):
    tokens.append(
      int(next_probs(PARAMS.target, np.array(tokens[-2:] + [0]))[0].argmax())
    )
  p, q = (next_probs(side, np.array(tokens[1:])) for side in PARAMS)
  for lenience, each in zip(leniences, found, strict=True):
    drafted = np.take_along_axis(p, q.argmax(1)[:, None], 1)[:, 0]
    expected = (drafted >= lenience * p.max(1))[:NUM_NEW]
    np.testing.assert_array_equal(each.values[0], expected)
  assert found[0].values.sum() < found[1].values.sum()


RULES = {
  'lenient': functools.partial(verification.speculative_sampling, lenience=0.3),
  'greedy': functools.partial(verification.greedy, lenience=0.3),
  'top_beta': functools.partial(top_beta, beta=2, tau=1.0),
}


@pytest.mark.slow
@pytest.mark.parametrize('name', RULES)
def test_a_relaxed_rule_is_measured_along_its_own_text(name):
  """Against what speculative decoding counts, after all texts of two tokens."""
  warm = name == 'lenient'
  of_drafter = TO_PROBS if warm else logits.standardize(temperature=0)
  drafter = functools.partial(
    drafters.autoregressive, TARGET, logits_to_probs=of_drafter
  )
  rows = [[1, a, b] for a in range(V) for b in range(V)] * (16 if warm else 1)
  prompt = toy.prompt(rows, row_ids=np.arange(len(rows)))
  method = Method(
    target=TARGET,
    drafter=drafter(gamma=6),
    verify_fn=RULES[name],
    logits_to_probs=TO_PROBS,
    eos_id=-1,
  )
  shared = {'method': method, 'max_len': PROMPT + 40}
  decode = functools.partial(speculative.generate, **shared)
  output = jax.jit(decode)(PARAMS, jax.random.key(1), prompt)
  expected = metrics.rates(output.statistics).alpha
  params = PARAMS._replace(drafter=[PARAMS.drafter])

  def alpha(**options):
    [[found]] = calibration.overlaps(
      params,
      jax.random.key(0),
      [prompt],
      drafters=[drafter(gamma=1)],
      num_tokens=40,
      **shared,
      **options,
    )
    return calibration.acceptance(found, max_gamma=1)['alpha']

  passes = functools.partial(calibration.passes_rule, verify_fn=RULES[name])
  found = alpha(verify_fn=RULES[name], share_fns=[passes])
  assert found == pytest.approx(expected, abs=0.03)
  assert alpha() < expected - 0.05


def test_figures_of_rows_that_can_be_followed_by_hand():
  nothing = 0.0
  found = Overlaps(
    values=np.array([[0.8, 0.6, 0.4, nothing], [1.0, 0.5, nothing, nothing]]),
    is_text=np.array([[True] * 4, [True] * 3 + [False]]),
    is_drafted=np.array([[True] * 3 + [False], [True] * 2 + [False] * 2]),
  )
  figures = calibration.acceptance(found, max_gamma=3)
  alpha = 3.3 / 5
  assert figures['alpha'] == pytest.approx(alpha)
  assert figures['abstained'] == pytest.approx(2 / 7)
  assert (figures['num_prefixes'], figures['num_rows']) == (5, 2)
  excess = np.array([1.8 - 3 * alpha, 1.5 - 2 * alpha])
  half = 1.96 * np.sqrt((excess**2).sum() * 2) / 5
  assert figures['alpha_interval'] == pytest.approx(
    [alpha - half, min(alpha + half, 1)]
  )
  centred = np.array([0.8, 0.6, 0.4, 1.0, 0.5]) - alpha
  products = [centred[0] * centred[1], centred[1] * centred[2]]
  products.append(centred[3] * centred[4])
  assert figures['autocorrelation'][0] == pytest.approx(
    np.mean(products) / np.mean(centred**2)
  )
  assert figures['autocorrelation'][3] is None
  # Blocks of one start at all seven prefixes, of two at five, of three at
  # three; no guess is no overlap.
  assert figures['profile'] == pytest.approx(
    [
      3.3 / 7,
      (0.48 + 0.24 + 0 + 0.5 + 0) / (0.8 + 0.6 + 0.4 + 1.0 + 0.5),
      (0.192 + 0 + 0) / (0.48 + 0.24 + 0.5),
    ]
  )


def test_one_row_has_no_interval_and_no_guess_no_alpha():
  one = np.ones((1, 4))
  found = Overlaps(one * 0.5, one > 0, one > 0)
  assert calibration.acceptance(found, max_gamma=2)['alpha_interval'] is None
  with pytest.raises(ValueError, match='no guess'):
    calibration.acceptance(found._replace(is_drafted=one < 0), max_gamma=2)


def test_runs_of_acceptance_lengthen_the_blocks():
  """Overlaps in runs: the profile knows, the mean does not."""
  runs = np.tile(np.repeat([1.0, 0.0], 10), 30)[None]
  found = Overlaps(runs, runs >= 0, runs >= 0)
  figures = calibration.acceptance(found, max_gamma=4)
  assert figures['alpha'] == pytest.approx(0.5)
  assert figures['autocorrelation'][0] > 0.7
  assert figures['profile'][0] == pytest.approx(0.5)
  assert min(figures['profile'][1:]) > 0.85


def test_rank_rates_are_p_of_what_the_drafter_ranks(texts):
  ranked = drafters.branching(
    TARGET,
    tree=Tree(parents=(0,) * 3),
    logits_to_probs=TO_PROBS,
    is_ranked=True,
  )
  copies = drafters.continuations(gamma=1, min_ngram=1, num_continuations=3)
  found = {
    name: calibration.rank_rates(
      PARAMS,
      jax.random.key(0),
      [prompt_of(0), prompt_of(2)],
      method=Method(target=TARGET, logits_to_probs=TO_PROBS, eos_id=-1),
      drafter=drafter,
      max_len=PROMPT + NUM_NEW,
      num_tokens=NUM_NEW,
    )
    for name, drafter in (('model', ranked), ('copies', copies))
  }
  p, q = (
    np.concatenate([next_probs(side, tokens[1:-1]) for tokens in texts])
    for side in PARAMS
  )
  expected = np.take_along_axis(p, np.argsort(-q, axis=1), axis=1).mean(0)
  np.testing.assert_allclose(found['model'], expected[:3], atol=1e-5)
  # The first copy is that of a lone one, and repeated ones are no guesses.
  lone = measure('prompt_lookup')
  first = lone.values.sum() / lone.is_text.sum()
  np.testing.assert_allclose(found['copies'][0], first, atol=1e-6)
  assert 0 < found['copies'][1:].sum() < 1 - first
