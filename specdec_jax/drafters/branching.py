"""Trees of drafts from a model: several tokens that may come next, and several
after each (Miao et al., SpecInfer, arXiv 2305.09781)."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from specdec_jax import base, distributions, keys, processors, trees
from specdec_jax.base import Array, Arrays, Context, Draft, Drafter, Tree
from specdec_jax.drafters.autoregressive import Chain, as_chain, reader
from specdec_jax.drafters.stateless import check_gamma


def branching(
  model: base.LanguageModel | Chain,
  *,
  tree: Tree,
  logits_to_probs: base.LogitsToProbsFn,
  is_ranked: bool = False,
) -> Drafter:
  """Drafts a tree of tokens from `model`, all nodes of a depth in one call.

  The nodes of the greatest depth are not fed. What the cache holds after a
  proposal lies in the order of the tree, so that the next one feeds again all
  that was committed since, true tokens in their places.

  The model is as for `autoregressive`, and takes placements. If `is_ranked`,
  children are the likeliest tokens of the distribution that `logits_to_probs`
  gives, which is not handed over, the likeliest first: for
  `target_sample_walk`. Else they are drawn from it without replacement, for
  `traversal`: of siblings each is drawn from what those before it left. Raises
  ValueError if the tree is none, is too large, or `model` is a language model
  without placements.
  """
  trees.check(tree)
  num_nodes = len(tree.parents)
  check_gamma(num_nodes)
  if isinstance(model, base.LanguageModel) and model.gather is None:
    raise ValueError('this language model takes no placements: draft a chain')
  chain = as_chain(model, num_unread=trees.depth(tree) + 1)
  levels, ranks = trees.levels(tree), trees.ranks(tree)

  def propose(
    params: Arrays,
    row_keys: Array,
    context: Context,
    cache: Arrays,
    *target: Arrays,
  ) -> tuple[Draft, Arrays]:
    logits, left, cache = chain.catch_up(params, context, cache, *target)
    logits, starts = logits[:, None], context.lengths - 1 - chain.lag
    node_keys = keys.split(row_keys, num_nodes)
    drawn: list[tuple[Array, Array | None]] = []
    above = range(1)
    for nodes in levels:
      # Node 0 is the pending token: node i is the draft's token i - 1.
      own = slice(nodes.start - 1, nodes.stop - 1)
      parents = np.array(tree.parents[own]) - above.start
      so_far = [tokens for tokens, _ in drawn]
      logits = processors.after_drafts(
        logits, context, *so_far, tree=tree, first=above.start
      )
      probs = logits_to_probs(logits, context.sampling)
      of_rank = ranks[nodes.start : nodes.stop]
      drawn.append(
        _ranked(probs, parents, of_rank)
        if is_ranked
        else _drawn(node_keys[own], probs, parents, of_rank)
      )
      above = nodes
      if nodes is not levels[-1]:
        take = functools.partial(jnp.take, indices=parents, axis=1)
        left = jax.tree.map(take, left)
        placement = trees.placement(tree, nodes, starts, cache.capacity)
        logits, left, cache = chain.extend(
          params, drawn[-1][0], left, cache, placement
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
  """The T nodes of a depth, int32 `[B, T]`, the likeliest first.

  `probs` are float32 `[B, P, V]`, of what follows each of the nodes above them;
  of each node, int `[T]`, `parents` says which of the P is its parent, and
  `ranks` how many siblings stand before it.
  """
  _, likeliest = jax.lax.top_k(probs, int(ranks.max()) + 1)
  return likeliest[:, parents, ranks].astype(jnp.int32), None


def _drawn(
  node_keys: Array, probs: Array, parents: np.ndarray, ranks: np.ndarray
) -> tuple[Array, Array]:
  """The nodes drawn without replacement, and float32 `[B, T, V]`, what each was
  drawn from; `node_keys` are `[T, B]`, and all else is as for `_ranked`."""
  ids = jnp.arange(probs.shape[-1], dtype=jnp.int32)
  sample = jax.vmap(distributions.sample, in_axes=(0, 1), out_axes=1)
  # Nodes of one rank are drawn together: all of them have another parent.
  by_rank = [np.flatnonzero(ranks == i) for i in range(ranks.max() + 1)]
  own, rest, found = np.arange(probs.shape[1]), probs, []
  for nodes in by_rank:
    has_more = np.flatnonzero(np.isin(own, parents[nodes]))
    own, drawn_from = own[has_more], rest[:, has_more]
    tokens = sample(node_keys[nodes], drawn_from)
    found.append((tokens, drawn_from))
    rest = jnp.where(ids[None, None] == tokens[..., None], 0.0, drawn_from)
    # Zeros where nothing is left: such a node is never accepted.
    rest = distributions.normalize(rest, jnp.zeros_like(rest))
  order = np.argsort(np.concatenate(by_rank))
  tokens, own_probs = (
    jnp.concatenate(each, axis=1)[:, order] for each in zip(*found, strict=True)
  )
  return tokens, own_probs
