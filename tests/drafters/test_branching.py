"""Trees of drafts from a model: what their nodes are, and what they give in the
loop."""

import functools

import jax
import numpy as np
import pytest

from specdec_jax import drafters
from specdec_jax.base import Context, Params, Tree
from specdec_jax.decoding import speculative, tree_drafts
from specdec_jax.decoding.method import Method
from specdec_jax.drafters.autoregressive import as_chain
from specdec_jax.sampling import logits
from tests import decoders, toy, toy_families, toy_t5, toy_tree
from tests.contracts import table_of_drafters as table
from tests.decoders import GREEDY

ROWS = [[1, 2, 3, 1, 2], [2], [4, 4], [0, 3, 0, 3]]
PROMPT = toy.prompt(ROWS, width=8)
CONTEXT = Context(tokens=PROMPT.decoder_tokens, lengths=PROMPT.decoder_lengths)
# Leaves at every depth, and nodes with elder siblings below others.
TREE = Tree(parents=(0, 0, 0, 1, 1, 2, 4, 6))
TO_PROBS = logits.standardize(temperature=0.8)


def chain_after_rows(name: str):
  """A chain, its params, its state, and the target's cache if it is read."""
  if name == 'eagle':
    target, network = toy_families.networks(
      table.TARGET_CONFIG, table.EAGLE_CONFIG, gamma=3
    )
    params, chain = table.ROWS['eagle'].make_params(), drafters.eagle(network)
    cache = target.init(params.target, PROMPT, 24)
    own, cache = chain.init(params.drafter, PROMPT, 24, cache)
    return chain, params.drafter, own, (cache,)
  row = {'toy': 'autoregressive', 'Llama': 'autoregressive, Llama'}[name]
  model = {'toy': table.MODEL, 'Llama': table.LLAMA}[name]
  params, chain = table.ROWS[row].make_params(), as_chain(model)
  return chain, params, chain.init(params, PROMPT, 24), ()


@functools.cache
def asked_after_each_path(name: str, is_ranked: bool):
  """A draft, and what the chain, which is fed each path token by token, says
  after every node."""
  chain, params, own, seen = chain_after_rows(name)
  drafter = drafters.branching(
    chain, tree=TREE, logits_to_probs=TO_PROBS, is_ranked=is_ranked
  )
  keys = jax.random.split(jax.random.key(1), len(ROWS))
  draft, _ = jax.jit(drafter.propose)(params, keys, CONTEXT, own, *seen)
  extend = jax.jit(chain.extend)
  after = {0: jax.jit(chain.catch_up)(params, CONTEXT, own, *seen)}
  for node, parent in enumerate(TREE.parents, start=1):
    tokens = draft.tokens[:, node - 1 : node]
    raw, left, cache = extend(params, tokens, *after[parent][1:], *seen)
    after[node] = raw[:, 0], left, cache
  return draft, {node: TO_PROBS(raw) for node, (raw, *_) in after.items()}


@pytest.mark.slow
@pytest.mark.parametrize('is_ranked', [True, False])
@pytest.mark.parametrize('name', ['toy', 'Llama', 'eagle'])
def test_children_follow_their_path_and_differ(name, is_ranked):
  draft, after = asked_after_each_path(name, is_ranked)
  left = dict(after)
  for node, parent in enumerate(TREE.parents, start=1):
    tokens, probs = draft.tokens[:, node - 1], left[parent]
    if is_ranked:
      np.testing.assert_array_equal(tokens, np.argmax(probs, axis=1))
    else:
      np.testing.assert_allclose(draft.probs[:, node - 1], probs, atol=1e-5)
    drawn = np.take_along_axis(np.asarray(probs), tokens[:, None], axis=1)
    assert (drawn > 0).all()
    left[parent] = toy_tree.without(probs, tokens)
  assert (draft.probs is None) == is_ranked


@pytest.mark.slow
def test_where_nothing_is_left_nothing_is_drawn():
  """Two tokens for three children: the third has no distribution."""
  chain, params, own, _ = chain_after_rows('toy')
  drafter = drafters.branching(
    chain,
    tree=Tree(parents=(0, 0, 0)),
    logits_to_probs=logits.standardize(top_k=2),
  )
  keys = jax.random.split(jax.random.key(1), len(ROWS))
  draft, _ = drafter.propose(params, keys, CONTEXT, own)
  np.testing.assert_allclose(draft.probs.sum(-1), [[1, 1, 0]] * 4, atol=1e-6)


PAIRS = {
  'toy': (toy.toy(5), toy.toy_params(5, seed=11), {}),
  'T5': (
    toy_t5.model(5),
    toy_t5.params(toy_t5.config(5), seed=3),
    {'encoder_rows': [[3, 1, 2], [4], [1, 1], [2, 4, 3, 1]]},
  ),
}


@pytest.mark.parametrize('name', PAIRS)
def test_a_tree_is_accepted_further_than_its_first_chain(name):
  model, params, source = PAIRS[name]
  params = Params(params, toy.perturb(params, seed=2, scale=0.5))
  prompt = toy.prompt([[0]] * 4 if source else ROWS, **source)
  shared = {'to_probs': GREEDY, 'max_len': 40}
  plain = decoders.plain(model, params, prompt, **shared)
  tree = toy_tree.shape(3, 2, 1)
  branching = drafters.branching(
    model, tree=tree, logits_to_probs=logits.standardize(), is_ranked=True
  )
  chain = drafters.autoregressive(
    model, gamma=3, logits_to_probs=GREEDY, is_argmax=True
  )
  runs = {}
  for kind, drafter, rule in (
    ('tree', branching, toy_tree.rule('greedy_walk', tree)),
    ('chain', chain, 'greedy'),
  ):
    output = decoders.speculate(
      model, params, drafter, prompt, rule=rule, **shared
    )
    assert decoders.rows(output) == decoders.rows(plain)
    runs[kind] = int(output.statistics.num_target_runs.sum())
  assert runs['tree'] < runs['chain']


def test_models_without_placements_draft_chains():
  model = table.MODEL._replace(gather=None)
  with pytest.raises(ValueError, match='takes no placements'):
    drafters.branching(model, tree=TREE, logits_to_probs=TO_PROBS)
  with pytest.raises(ValueError, match='1024, got 1025'):
    drafters.branching(
      table.MODEL, tree=Tree(parents=(0,) * 1025), logits_to_probs=TO_PROBS
    )


@pytest.mark.slow
@pytest.mark.parametrize('is_by_paths', [False, True])
def test_eagle_reads_the_features_of_the_path_that_was_accepted(is_by_paths):
  """In the loop they lay among those of all nodes, or in the row of its path.
  What is drafted next is what would be had the context been the prompt."""
  tree = toy_tree.shape(3, 2)
  target, network = toy_families.networks(
    table.TARGET_CONFIG, table.EAGLE_CONFIG, gamma=2
  )
  if is_by_paths:
    target = tree_drafts.by_paths(target, tree)
  drafter = drafters.branching(
    drafters.eagle(network), tree=tree, logits_to_probs=TO_PROBS, is_ranked=True
  )
  params = table.ROWS['eagle'].make_params()
  method = Method(
    target=target,
    drafter=drafter,
    verify_fn=toy_tree.rule('target_sample_walk', tree),
    logits_to_probs=TO_PROBS,
    eos_id=-1,
  )
  key, width = jax.random.key(0), 24
  init = jax.jit(
    functools.partial(speculative.init, method=method, max_len=width)
  )
  step = jax.jit(functools.partial(speculative.step, method=method))
  propose = jax.jit(
    functools.partial(
      speculative.propose, drafter=drafter, vocab_size=target.vocab_size
    )
  )
  state = init(params, key, toy.prompt(ROWS, width=width))
  counts = []
  for _ in range(3):
    state, info = step(params, state)
    counts += info.counts.tolist()
    context = jax.device_get(state.context)
    rows = [
      row[:length].tolist()
      for row, length in zip(context.tokens, context.lengths, strict=True)
    ]
    fresh = init(params, key, toy.prompt(rows, width=width))
    draft, expected = (propose(params, each)[0] for each in (state, fresh))
    np.testing.assert_array_equal(draft.tokens, expected.tokens)
  assert {*counts} == {1, 2, 3}
