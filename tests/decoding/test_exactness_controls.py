"""The test of exactness must reject decoders that are known to be wrong."""

import numpy as np
import pytest

from specdec_jax import drafters, verification
from specdec_jax.base import Params
from specdec_jax.sampling import logits
from tests import broken, goodness_of_fit, slow, toy, toy_tree, trial
from tests.proof_report import record

VOCAB_SIZE = 4
GAMMA = 3
# All of what a right decoder has to pass are needed by few variants: what a
# quarter is enough to reject, all are.
NEED_ALL = {'block residual not scaled'}
TARGET = toy.toy(VOCAB_SIZE)
TARGET_PARAMS = toy.toy_params(VOCAB_SIZE, seed=1)
PARAMS = Params(TARGET_PARAMS, toy.perturb(TARGET_PARAMS, seed=2))


def _trial(**changes) -> trial.Trial:
  """The trial that is right, with something put in its place."""
  return trial.Trial(
    target=TARGET,
    params=PARAMS,
    drafter=drafters.autoregressive(
      TARGET, gamma=GAMMA, logits_to_probs=logits.standardize()
    ),
    verify_fn=verification.speculative_sampling,
  )._replace(**changes)


def _check_rejected(record_property, variant: str, broken_trial: trial.Trial):
  num_decodes = trial.NUM_DECODES // (1 if variant in NEED_ALL else 4)
  report = trial.run(broken_trial, num_decodes=num_decodes).report
  trial.report_audit(
    record_property, 'Broken decoders, same audit', report, variant=variant
  )
  assert report.is_rejected


@pytest.mark.proof
@slow.parametrize(
  'variant',
  broken.VERIFY_FNS,
  now=['resample from p', 'accept draw reused'],
)
def test_broken_rule_is_rejected(variant, record_property):
  broken_trial = _trial(verify_fn=broken.VERIFY_FNS[variant])
  _check_rejected(record_property, variant, broken_trial)


@pytest.mark.proof
@slow.parametrize(
  'variant',
  broken.DRAFTERS,
  now=['argmax draft, softmax q', 'top-k draft, raw q'],
)
@slow.parametrize(
  'rule',
  [verification.speculative_sampling, verification.block_verification],
  now=[verification.speculative_sampling],
)
def test_broken_drafter_is_rejected(variant, rule, record_property):
  broken_trial = _trial(
    drafter=broken.DRAFTERS[variant](TARGET, GAMMA), verify_fn=rule
  )
  name = f'{variant} ({rule.__name__})'
  _check_rejected(record_property, name, broken_trial)


@pytest.mark.proof
@pytest.mark.parametrize('variant', broken.TARGETS)
def test_broken_cache_is_rejected(variant, record_property):
  broken_trial = _trial(target=broken.TARGETS[variant](TARGET))
  _check_rejected(record_property, variant, broken_trial)


_TREE = toy_tree.BENT
_BROKEN_TREES = {
  **{
    name: {'target': change(TARGET)}
    for name, change in broken.WITH_TREES.items()
  },
  'random children deduplicated': {
    'drafter': toy_tree.drafter(_TREE, is_sampled=True, deduplicates=True)
  },
  'q not renormalised after a rejection': {
    'verify_fn': broken.as_tree_rule(broken.traversal_without_norm, _TREE)
  },
}


@pytest.mark.proof
@slow.parametrize(
  'variant',
  _BROKEN_TREES,
  now=['siblings seen', 'q not renormalised after a rejection'],
)
def test_broken_tree_is_rejected(variant, record_property):
  right = _trial(
    drafter=toy_tree.drafter(_TREE, is_sampled=True),
    verify_fn=toy_tree.rule('traversal', _TREE),
  )
  broken_trial = right._replace(**_BROKEN_TREES[variant])
  _check_rejected(record_property, variant, broken_trial)


def test_the_drafter_behind_the_broken_ones_is_right():
  whole = broken.drafter(TARGET, gamma=GAMMA)
  assert not trial.run(_trial(drafter=whole)).report.is_rejected


@pytest.mark.slow
@pytest.mark.proof
@pytest.mark.parametrize('num_fed', [2, 1])
def test_missing_catch_up_shows_in_self_drafting(num_fed, record_property):
  """A drafter with a hole in its cache is lossless, but no longer itself: it
  differs from the target that has the same weights."""
  result = trial.run(
    _trial(
      params=Params(TARGET_PARAMS, TARGET_PARAMS),
      drafter=broken.drafter(TARGET, gamma=1, num_fed=num_fed),
    )
  )
  tested = int(np.sum(result.statistics.num_tested))
  accepted = int(np.sum(result.statistics.num_accepted))
  record(
    record_property,
    'Self-drafting, with and without catching up after full acceptance',
    fed_again=num_fed,
    tested=tested,
    accepted=accepted,
    verdict='accepts all' if accepted == tested else 'rejected',
  )
  assert not result.report.is_rejected
  assert (accepted == tested) == (num_fed == 2)


def test_what_follows_in_a_chain_known_by_hand():
  params = {'table': np.zeros((3, 2, 2), np.float32)}
  params['table'][:, 1, 1] = np.log(3)
  after = goodness_of_fit.teacher(
    toy.toy(2),
    params,
    (0,),
    sampling=goodness_of_fit.Sampling(),
    num_new=3,
  )
  np.testing.assert_allclose(after(()), [1 / 2, 1 / 2])
  np.testing.assert_allclose(after((1,)), [1 / 4, 3 / 4])
  np.testing.assert_allclose(after((1, 0)), [1 / 2, 1 / 2])
