"""Every part under 64-bit types: the same dtypes, and no other one on the way.

Programs are traced and not compiled; with strict promotion, two dtypes that
meet are an error. What they compute is in `test_exactness_loop`.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specdec_jax.base import Params, Prompt
from specdec_jax.decoding import autoregressive, speculative
from specdec_jax.decoding.method import Method
from specdec_jax.sampling import logits
from tests import slow, toy, toy_t5, toy_tree
from tests.contracts import table_of_drafters as table
from tests.contracts.table_of_models import ROWS as MODELS
from tests.contracts.test_verifiers import ROWS as RULES

SAMPLED = logits.standardize(temperature=0.9, top_k=3, top_p=0.9)
KEY = (jax.random.key(0),)
ENDS = {'max_len': 12, 'eos_id': (0, 1)}


def check(generate, params, start: Prompt, *, key=()):
  """The same dtypes with and without 64-bit types, prompts included."""
  without = jax.eval_shape(generate, params, *key, start)
  with jax.enable_x64(True):
    # As `jnp.array` makes them there.
    wide = jax.tree.map(lambda x: jnp.asarray(np.asarray(x), jnp.int64), start)
    within = jax.eval_shape(generate, params, *key, wide)
  assert within == without


def prompt(**fields) -> Prompt:
  return toy.prompt([[1, 2, 3], [2]], max_lengths=[12, 8], **fields)


@functools.cache
def toy_params(vocab_size: int):
  return toy.toy_params(vocab_size, seed=3)


def speculate(drafter, *, target=table.MODEL, **rule):
  method = Method(
    target=target,
    drafter=drafter,
    logits_to_probs=SAMPLED,
    eos_id=ENDS['eos_id'],
    **rule,
  )
  return functools.partial(
    speculative.generate, method=method, max_len=ENDS['max_len']
  )


@slow.parametrize(
  'name', table.ROWS, now=['prompt_lookup', 'eagle', 'adaptive, threshold']
)
def test_every_drafter(name):
  row = table.ROWS[name]
  params = Params(toy_params(table.VOCAB_SIZE), row.make_params())
  drafter, rule = row.make(3), {}
  if row.is_tree:
    name = 'target_sample_walk' if row.is_one_hot else 'traversal'
    rule['verify_fn'] = toy_tree.rule(name, drafter.tree)
  check(speculate(drafter, **rule), params, prompt(), key=KEY)


@pytest.mark.parametrize('name', RULES)
def test_every_rule(name):
  row = table.ROWS['autoregressive']
  params = Params(toy_params(table.VOCAB_SIZE), row.make_params())
  generate = speculate(row.make(3), verify_fn=RULES[name])
  check(generate, params, prompt(), key=KEY)


def prompt_for(name: str) -> Prompt:
  """The prompt of a model of the table."""
  has_encoder = name.startswith('T5') and 'decoder only' not in name
  return prompt(encoder_rows=[[3, 2, 1], [4, 1]] if has_encoder else None)


@slow.parametrize('name', MODELS, now=['llama, later', 'T5 1.1'])
def test_every_model_in_plain_decoding(name):
  model, make_params = MODELS[name]
  start = prompt_for(name)
  method = Method(target=model, logits_to_probs=SAMPLED, eos_id=ENDS['eos_id'])
  plain = functools.partial(
    autoregressive.generate, method=method, max_len=ENDS['max_len']
  )
  check(plain, Params(make_params()), start, key=KEY)


def test_what_an_encoder_reads():
  config = toy_t5.config(5)
  generate = speculate(
    table.ROWS['prompt_lookup'].make(2),
    target=toy.families.language_model(config),
  )
  start = prompt(encoder_rows=[[3, 2, 1], [4, 1]])
  check(generate, Params(toy_t5.params(config, seed=0)), start, key=KEY)


@pytest.mark.parametrize('rule', ['target_sample_walk', 'traversal'])
def test_trees_of_drafts(rule):
  drafter = toy_tree.drafter(
    toy_tree.BENT, is_sampled=rule == 'traversal', may_abstain=True
  )
  params = Params(toy_params(table.VOCAB_SIZE), toy_params(table.VOCAB_SIZE))
  verify_fn = toy_tree.rule(rule, toy_tree.BENT)
  check(speculate(drafter, verify_fn=verify_fn), params, prompt(), key=KEY)
