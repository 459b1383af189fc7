"""The compiled loop, drafter and all, against the target's distribution."""

import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specdec_jax import drafters, lazy, verification
from specdec_jax.base import Params
from specdec_jax.drafters import text_pool
from specdec_jax.sampling import logits
from tests import (
  extras,
  goodness_of_fit,
  slow,
  toy,
  toy_eagle,
  toy_families,
  toy_tree,
  trial,
)

VOCAB_SIZE = 4
TARGET = toy.toy(VOCAB_SIZE)
TARGET_PARAMS = toy.toy_params(VOCAB_SIZE, seed=1)
DRAFTER_PARAMS = toy.perturb(TARGET_PARAMS, seed=2)
LOSSLESS = {
  'speculative_sampling': verification.speculative_sampling,
  'block': verification.block_verification,
}
SAMPLINGS = {
  'T 1': goodness_of_fit.Sampling(),
  'T 0.7': goodness_of_fit.Sampling(temperature=0.7),
  'T 1.5': goodness_of_fit.Sampling(temperature=1.5),
  'top-k 2': goodness_of_fit.Sampling(top_k=2),
  'top-p 0.8': goodness_of_fit.Sampling(top_p=0.8),
  'min-p 0.4': goodness_of_fit.Sampling(min_p=0.4),
  'typical-p 0.6': goodness_of_fit.Sampling(typical_p=0.6),
  'T 0.7, top-k 3, top-p 0.9': goodness_of_fit.Sampling(0.7, 3, 0.9),
}


def _drafter(name: str, gamma: int, sampling=goodness_of_fit.Sampling()):
  """A drafter and its params."""
  to_probs = logits.standardize(**sampling._asdict())
  if name.endswith('autoregressive'):
    drafter = drafters.autoregressive(
      TARGET,
      gamma=gamma,
      logits_to_probs=to_probs,
      is_argmax=name.startswith('argmax'),
    )
    return drafter, DRAFTER_PARAMS
  if name == 'suffix':
    # Full: of eight texts the last five are there.
    texts = np.random.default_rng(0).integers(0, VOCAB_SIZE, (8, 12))
    pool = text_pool.remember(text_pool.empty(64), texts)
    return drafters.suffix(gamma=gamma, min_ngram=1), pool
  if name.endswith('gram'):
    make = lazy.attribute('tests.contrib.ngram.contract_rows:in_the_loop')
    drafter = make(
      name, gamma=gamma, vocab_size=VOCAB_SIZE, logits_to_probs=to_probs
    )
    return drafter, ()
  drafter = {
    'prompt_lookup': lambda: drafters.prompt_lookup(gamma=gamma, min_ngram=1),
    'uniform': lambda: drafters.uniform(gamma=gamma, vocab_size=VOCAB_SIZE),
  }[name]()
  return drafter, ()


def check(record_property, configuration: str, **fields) -> trial.Result:
  """Checks a trial of the fields against the exact distribution."""
  return trial.check(
    trial.Trial(**fields),
    record_property,
    'The compiled loop against the exact distribution, false alarm rate 1e-9',
    configuration,
    num_decodes=100_800,
  )


# Drafter, gamma and rule; both rules where drafts are sampled from a model, and
# every width of draft that those below do not have.
_CASES = [
  *(('autoregressive', gamma, rule) for gamma in (1, 3) for rule in LOSSLESS),
  ('argmax autoregressive', 2, 'speculative_sampling'),
  ('prompt_lookup', 2, 'speculative_sampling'),
  ('prompt_lookup', 3, 'block'),
  ('suffix', 3, 'speculative_sampling'),
  ('unigram', 3, 'block'),
  ('bigram', 1, 'speculative_sampling'),
  ('bigram', 2, 'block'),
  ('argmax bigram', 2, 'speculative_sampling'),
  ('uniform', 2, 'block'),
]
_PROVEN = {'autoregressive', 'prompt_lookup', 'suffix', 'bigram'}
# Each kind of drafter, one argmax among them, and both rules.
_NOW = [*_CASES[0:4:3], *_CASES[4:6], _CASES[7], _CASES[10], _CASES[12]]


def _marks(name: str) -> list[pytest.MarkDecorator]:
  """Of a row, by the name of its drafter."""
  marks = [pytest.mark.proof] if name in _PROVEN else []
  if name.endswith('gram'):
    marks.append(extras.needs('contrib/ngram'))
  return marks


@slow.parametrize(
  ('name', 'gamma', 'rule'),
  [pytest.param(*case, marks=_marks(case[0])) for case in _CASES],
  now=_NOW,
)
def test_every_drafter_and_rule(name, gamma, rule, record_property):
  drafter, params = _drafter(name, gamma)
  result = check(
    record_property,
    f'{name}, {rule}, gamma {gamma}',
    target=TARGET,
    params=Params(TARGET_PARAMS, params),
    drafter=drafter,
    verify_fn=LOSSLESS[rule],
  )
  accepted = np.sum(result.statistics.num_accepted)
  tested = np.sum(result.statistics.num_tested)
  assert 0 < accepted < tested


@pytest.mark.proof
@slow.parametrize(
  ('rule', 'is_sampled', 'ends'),
  [
    ('target_sample_walk', False, {}),
    ('traversal', True, {}),
    ('traversal', False, {'eos_id': 3, 'num_new': (4, 2, 3)}),
    ('target_sample_walk', True, {'eos_id': 3, 'num_new': (4, 1, 3)}),
  ],
  now=[
    ('target_sample_walk', False, {}),
    ('traversal', True, {}),
  ],
)
def test_trees(rule, is_sampled, ends, record_property):
  """Siblings drawn without replacement, and the likeliest; the last two of
  these abstain from time to time, and end in mid-block."""
  tree = toy_tree.BENT
  result = check(
    record_property,
    f'tree of {len(tree.parents)} nodes, {rule}, '
    + ('sampled' if is_sampled else 'likeliest')
    + (', EOS and ragged limits' if ends else ''),
    target=TARGET,
    params=Params(TARGET_PARAMS, DRAFTER_PARAMS),
    drafter=toy_tree.drafter(
      tree, is_sampled=is_sampled, may_abstain=bool(ends)
    ),
    verify_fn=toy_tree.rule(rule, tree),
    **ends,
  )
  by_depth = np.sum(result.statistics.num_accepted, axis=0)
  assert (by_depth > 0).all()
  assert (by_depth < np.sum(result.statistics.num_tested, axis=0)).any()


@pytest.mark.proof
@pytest.mark.parametrize(
  ('name', 'rule'),
  [('continuations', 'target_sample_walk'), ('branching', 'traversal')],
)
def test_drafters_of_trees(name, rule, record_property):
  """Several copies, which abstain where nothing repeats, and a model's tokens
  drawn without replacement."""
  if name == 'continuations':
    params: Any = ()
    drafter = drafters.continuations(gamma=2, num_continuations=2, min_ngram=1)
  else:
    params = DRAFTER_PARAMS
    drafter = drafters.branching(
      TARGET, tree=toy_tree.BENT, logits_to_probs=logits.standardize()
    )
  result = check(
    record_property,
    f'{name}, {rule}, tree of {drafter.gamma} nodes',
    target=TARGET,
    params=Params(TARGET_PARAMS, params),
    drafter=drafter,
    verify_fn=toy_tree.rule(rule, drafter.tree),
    prompts=((1, 2, 1, 3, 1), (0, 2), (2, 1, 0)),
  )
  assert (np.sum(result.statistics.num_accepted, axis=0) > 0).all()
  num_trees = np.sum(result.statistics.num_drafted) / drafter.gamma
  has_abstained = num_trees < np.sum(result.statistics.num_target_runs)
  assert has_abstained == (name == 'continuations')


_MIXED = 'T 0.7, top-k 3, top-p 0.9'


def _sampled(rule: str, settings: str) -> dict[str, Any]:
  """Fields of a trial in which target and drafter are sampled so."""
  sampling = SAMPLINGS[settings]
  if rule == 'traversal':
    drafter = drafters.branching(
      TARGET,
      tree=toy_tree.BENT,
      logits_to_probs=logits.standardize(**sampling._asdict()),
    )
    verify_fn, params = toy_tree.rule(rule, toy_tree.BENT), DRAFTER_PARAMS
  else:
    drafter, params = _drafter('autoregressive', 2, sampling)
    verify_fn = LOSSLESS[rule]
  return {
    'target': TARGET,
    'params': Params(TARGET_PARAMS, params),
    'drafter': drafter,
    'verify_fn': verify_fn,
    'sampling': sampling,
  }


@slow.parametrize(
  ('rule', 'settings'),
  [
    ('speculative_sampling', 'T 0.7'),
    ('block', 'T 1.5'),
    ('speculative_sampling', 'top-k 2'),
    ('block', 'top-p 0.8'),
    ('speculative_sampling', 'min-p 0.4'),
    ('speculative_sampling', 'typical-p 0.6'),
    ('block', 'typical-p 0.6'),
    ('traversal', 'typical-p 0.6'),
    pytest.param('speculative_sampling', _MIXED, marks=pytest.mark.proof),
    pytest.param('block', _MIXED, marks=pytest.mark.proof),
    ('traversal', _MIXED),
  ],
  now=[('block', _MIXED)],
)
def test_every_way_of_sampling(rule, settings, record_property):
  check(
    record_property,
    f'{settings}, {rule}, gamma 2',
    **_sampled(rule, settings),
  )


@pytest.mark.slow
@pytest.mark.parametrize(
  ('rule', 'settings'),
  [
    (rule, settings)
    for rule in (*LOSSLESS, 'traversal')
    for settings in ('top-k 2', 'top-p 0.8', 'min-p 0.4', 'typical-p 0.6')
  ],
)
def test_limits_of_the_first_position_alone_are_noticed(
  rule, settings, monkeypatch
):
  name = f'keep_{settings.split()[0].replace("-", "_")}'
  whole = getattr(logits, name)

  def late(values, limit):
    if values.ndim == 2:  # A drafter's.
      return whole(values, limit)
    return jnp.concatenate([whole(values[:, :1], limit), values[:, 1:]], axis=1)

  monkeypatch.setattr(logits, name, late)
  broken = trial.Trial(**_sampled(rule, settings))
  assert trial.run(
    broken, num_decodes=trial.NUM_DECODES // 4
  ).report.is_rejected


@pytest.mark.slow
@pytest.mark.parametrize(
  ('rule', 'p_settings', 'q_settings'),
  [
    ('speculative_sampling', 'top-k 2', 'T 1.5'),
    ('block', 'T 1', 'top-k 2'),
  ],
)
def test_drafter_sampled_otherwise(
  rule, p_settings, q_settings, record_property
):
  drafter, params = _drafter('autoregressive', 3, SAMPLINGS[q_settings])
  check(
    record_property,
    f'p at {p_settings}, q at {q_settings}, {rule}',
    target=TARGET,
    params=Params(TARGET_PARAMS, params),
    drafter=drafter,
    verify_fn=LOSSLESS[rule],
    sampling=SAMPLINGS[p_settings],
  )


@pytest.mark.proof
@slow.parametrize(
  ('rule', 'name'),
  itertools.product(LOSSLESS, ['autoregressive', 'prompt_lookup']),
  now=[
    ('block', 'autoregressive'),
    ('speculative_sampling', 'prompt_lookup'),
  ],
)
def test_eos_and_ragged_limits_in_mid_block(rule, name, record_property):
  drafter, params = _drafter(name, 3)
  result = check(
    record_property,
    f'EOS and ragged limits, {name}, {rule}, gamma 3',
    target=TARGET,
    params=Params(TARGET_PARAMS, params),
    drafter=drafter,
    verify_fn=LOSSLESS[rule],
    prompts=((1,), (0, 2), (2, 1, 0), (2, 2, 1, 0, 2)),
    num_new=(4, 2, 3, 1),
    eos_id=3,
  )
  assert len(np.unique(result.statistics.num_tokens)) == 4


@pytest.mark.slow
@pytest.mark.proof
@pytest.mark.parametrize('rule', LOSSLESS)
def test_drafts_of_ragged_lengths(rule, record_property):
  """A drafter that stops after its own token 0 and skips every third length."""
  whole, params = _drafter('autoregressive', 3)

  def propose(params, row_keys, context, state):
    draft, state = whole.propose(params, row_keys, context, state)
    is_zero = draft.tokens == 0
    stop = jnp.where(
      jnp.any(is_zero, axis=1), jnp.argmax(is_zero, axis=1) + 1, 3
    )
    lengths = jnp.where(context.lengths % 3 == 0, 0, stop)
    return draft.replace(lengths=lengths.astype(jnp.int32)), state

  check(
    record_property,
    f'drafts of ragged lengths, {rule}',
    target=TARGET,
    params=Params(TARGET_PARAMS, params),
    drafter=whole._replace(propose=propose, may_abstain=True),
    verify_fn=LOSSLESS[rule],
  )


@pytest.mark.slow
@pytest.mark.parametrize(
  ('name', 'rule'),
  [
    ('uniform', 'speculative_sampling'),
    ('uniform', 'block'),
    ('argmax autoregressive', 'block'),
    ('tree', 'traversal'),
    ('likeliest tree', 'traversal'),
    ('tree', 'target_sample_walk'),
  ],
)
def test_a_target_that_is_not_a_number(name, rule, record_property):
  """What comes before is committed with the chances of plain decoding, which
  stops there as it would at an EOS."""
  if 'tree' in name:
    drafter = toy_tree.drafter(toy_tree.BENT, is_sampled=name == 'tree')
    verify_fn, params = toy_tree.rule(rule, toy_tree.BENT), DRAFTER_PARAMS
  else:
    drafter, params = _drafter(name, 2)
    verify_fn = LOSSLESS[rule]
  check(
    record_property,
    f'NaN after a token, {name}, {rule}',
    target=TARGET,
    params=Params(TARGET_PARAMS, params),
    drafter=drafter,
    verify_fn=verify_fn,
    num_new=(4, 2, 3),
    eos_id=3,
    is_nan_after_eos=True,
  )


def test_plain_decoding(record_property):
  """Without drafts; `test_oracles` shows that it is plain decoding exactly."""
  check(
    record_property,
    'no drafts',
    target=TARGET,
    params=Params(TARGET_PARAMS),
    drafter=drafters.none(),
    verify_fn=verification.speculative_sampling,
    sampling=SAMPLINGS['top-p 0.8'],
  )


@pytest.mark.slow
@pytest.mark.parametrize(
  ('name', 'rule', 'key_impl'),
  [
    ('autoregressive', 'speculative_sampling', 'unsafe_rbg'),
    ('uniform', 'block', 'rbg'),
  ],
)
def test_keys_of_other_kinds(name, rule, key_impl, record_property):
  """The first row is done long before the others: their draws go on. All other
  tests of exactness have keys of these kinds in `make modes`."""
  drafter, params = _drafter(name, 2)
  check(
    record_property,
    f'{key_impl} key, {name}, {rule}, gamma 2',
    target=TARGET,
    params=Params(TARGET_PARAMS, params),
    drafter=drafter,
    verify_fn=LOSSLESS[rule],
    num_new=(1, 4, 4),
    key_impl=key_impl,
  )


@pytest.mark.slow
def test_64_bit_types(record_property):
  drafter, params = _drafter('prompt_lookup', 2)
  with jax.enable_x64(True):
    check(
      record_property,
      '64-bit types, prompt_lookup, speculative_sampling, gamma 2',
      target=TARGET,
      params=Params(TARGET_PARAMS, params),
      drafter=drafter,
      verify_fn=verification.speculative_sampling,
    )


def _eagle(target_params):
  """A target that keeps features, and a drafter that lacks a token."""
  config = toy.llama_config(VOCAB_SIZE, num_layers=2)
  own = toy_eagle.config(config)
  target, network = toy_families.networks(config, own, gamma=2)
  drafter = drafters.autoregressive(
    drafters.eagle(network), gamma=2, logits_to_probs=logits.standardize()
  )
  params = toy_eagle.params(own, seed=2)
  return target, drafter, toy_eagle.joined(target_params, params)


@pytest.mark.slow
@pytest.mark.proof
@pytest.mark.parametrize(
  ('family', 'rule', 'name'),
  [
    ('Llama', 'speculative_sampling', 'autoregressive'),
    ('Llama', 'speculative_sampling', 'eagle'),
    ('Llama, later', 'block', 'autoregressive'),
    ('T5', 'block', 'prompt_lookup'),
    ('umT5', 'speculative_sampling', 'autoregressive'),
    ('Gemma 2', 'speculative_sampling', 'autoregressive'),
    ('Gemma 3', 'block', 'autoregressive'),
    ('Gemma 4', 'speculative_sampling', 'autoregressive'),
    ('Gemma 4, experts', 'block', 'autoregressive'),
    ('T5Gemma', 'speculative_sampling', 'autoregressive'),
  ],
)
def test_the_real_networks(family, rule, name, record_property):
  """Ragged encoder and decoder rows, and EOS in mid-block."""
  target, params = toy_families.make(family, VOCAB_SIZE, num_layers=2)
  if name == 'eagle':
    target, drafter, drafter_params = _eagle(params)
  elif name == 'autoregressive':
    model, drafter_params = toy_families.make(family, VOCAB_SIZE, num_layers=1)
    drafter = drafters.autoregressive(
      model, gamma=2, logits_to_probs=logits.standardize()
    )
  else:
    drafter, drafter_params = _drafter(name, 2)
  has_encoder = toy_families.has_encoder(family)
  result = check(
    record_property,
    f'{family}, {name}, {rule}, gamma 2',
    target=target,
    params=Params(params, drafter_params),
    drafter=drafter,
    verify_fn=LOSSLESS[rule],
    prompts=((0,), (0, 2), (2, 1, 0)),
    num_new=(4, 4, 3),
    encoder_rows=((1, 3), (2,), (3, 1, 2, 1)) if has_encoder else None,
    eos_id=3,
  )
  accepted = np.sum(result.statistics.num_accepted)
  assert 0 < accepted < np.sum(result.statistics.num_tested)
