"""Trees of drafts from a model: several candidates for every token (Miao et
al., SpecInfer, arXiv 2305.09781)."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from specdec_jax import base, trees
from specdec_jax.base import Array, Arrays, Context, Draft, Drafter, Tree
from specdec_jax.drafters.autoregressive import Chain, as_chain, reader
from specdec_jax.drafters.stateless import check_gamma
from specdec_jax.sampling import distributions, keys, processors


def branching(
  model: base.LanguageModel | Chain,
  *,
  tree: Tree,
  logits_to_probs: base.LogitsToProbsFn,
  is_ranked: bool = False,
) -> Drafter:
  """Drafts a tree of tokens from `model`, all nodes of a depth in one call.

  The deepest nodes are not fed. A proposal leaves the cache in the order of the
  tree, so that the next one feeds the tokens committed since again, in the
  order of the text.

  The model is as in `autoregressive` and takes placements. If `is_ranked`,
  children are the likeliest tokens by `logits_to_probs`, likeliest first, and
  the draft has no probabilities: for `target_sample_walk`. Otherwise each
  sibling is drawn from what those before it left: for `traversal`. Raises
  ValueError if the tree is malformed or too large, or `model` takes no
  placements.
  """
  trees.check(tree)
  num_nodes = len(tree.parents)
  check_gamma(num_nodes)
  if isinstance(model, base.LanguageModel) and model.gather is None:
    raise ValueError('this language model takes no placements: draft a chain')
  chain = as_chain(model, num_unread=trees.depth(tree) + 1)
  levels = trees.levels(tree)
  ranks = trees.ranks(tree)

  def propose(
    params: Arrays,
    row_keys: Array,
    context: Context,
    cache: Arrays,
    *target: Arrays,
  ) -> tuple[Draft, Arrays]:
    logits, left, cache = chain.catch_up(params, context, cache, *target)
    logits = logits[:, None]
    starts = context.lengths - 1 - chain.lag
    node_keys = keys.split(row_keys, num_nodes)
    drawn: list[tuple[Array, Array | None]] = []
    above = range(1)
    for nodes in levels:
      # Node 0 is the pending token: node i is the draft's token i - 1.
      span = slice(nodes.start - 1, nodes.stop - 1)
      parents = np.array(tree.parents[span]) - above.start  # within the level
      so_far = [tokens for tokens, _ in drawn]
      logits = processors.after_drafts(
        logits, context, *so_far, tree=tree, first=above.start
      )
      probs = logits_to_probs(logits, context.sampling)
      node_ranks = ranks[nodes.start : nodes.stop]
      if is_ranked:
        drawn.append(_ranked(probs, parents, node_ranks))
      else:
        drawn.append(_drawn(node_keys[span], probs, parents, node_ranks))
      above = nodes
      if nodes is not levels[-1]:
        take = functools.partial(jnp.take, indices=parents, axis=1)
        left = jax.tree.map(take, left)
        placement = None
        if chain.has_entries:
          placement = trees.placement(tree, nodes, starts, cache.capacity)
        logits, left, cache = chain.extend(
          params, drawn[-1][0], left, cache, *target, placement=placement
        )
    tokens, probs = jax.tree.map(
      lambda *of_levels: jnp.concatenate(of_levels, axis=1), *drawn
    )
    lengths = jnp.full_like(context.lengths, num_nodes)
    return Draft(tokens=tokens, probs=probs, lengths=lengths), cache

  return Drafter(
    num_nodes,
    chain.init,
    propose,
    reads_target_cache=chain.reads_target_cache,
    tree=tree,
    read=reader(model),
  )


def _ranked(
  probs: Array, parents: np.ndarray, ranks: np.ndarray
) -> tuple[Array, None]:
  """Picks the T nodes of a depth, int32 `[B, T]`, likeliest first.

  `probs` are float32 `[B, P, V]`, after each of the P nodes above; `parents`
  and `ranks`, int `[T]`, are each node's parent among them and its number of
  elder siblings. Parents [0, 0, 1], ranks [0, 1, 0]: the best two and the best.
  """
  _, likeliest = jax.lax.top_k(probs, int(ranks.max()) + 1)
  return likeliest[:, parents, ranks].astype(jnp.int32), None


def _drawn(
  node_keys: Array, probs: Array, parents: np.ndarray, ranks: np.ndarray
) -> tuple[Array, Array]:
  """Draws the nodes without replacement; also returns the distributions that
  they were drawn from, float32 `[B, T, V]`. `node_keys` are `[T, B]`; the other
  arguments are those of `_ranked`."""
  ids = jnp.arange(probs.shape[-1], dtype=jnp.int32)
  sample = jax.vmap(distributions.sample, in_axes=(0, 1), out_axes=1)
  # Nodes of one rank have different parents and are drawn together: of ranks
  # [0, 1, 0] first nodes 0 and 2, then node 1 from what node 0 left.
  by_rank = [np.flatnonzero(ranks == i) for i in range(ranks.max() + 1)]
  # The parents with nodes of the current rank, and their remaining probability.
  open_parents = np.arange(probs.shape[1])
  rest = probs
  drawn = []
  for nodes in by_rank:
    has_more = np.flatnonzero(np.isin(open_parents, parents[nodes]))
    open_parents = open_parents[has_more]
    drawn_from = rest[:, has_more]
    tokens = sample(node_keys[nodes], drawn_from)
    drawn.append((tokens, drawn_from))
    rest = jnp.where(ids[None, None] == tokens[..., None], 0.0, drawn_from)
    # [.5, .3, .2] without token 0: [0, .6, .4]. If no probability remains, the
    # distribution is 0, and a node from it is never accepted.
    rest = distributions.normalize(rest, jnp.zeros_like(rest))
  order = np.argsort(np.concatenate(by_rank))
  # From the order of ranks to the order of nodes.
  all_tokens, all_probs = (
    jnp.concatenate(values, axis=1)[:, order]
    for values in zip(*drawn, strict=True)
  )
  return all_tokens, all_probs
