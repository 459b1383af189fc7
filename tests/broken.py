"""Decoders that are wrong in the ways that real ones have been.

The tests of exactness must reject every one of them, or they prove nothing.
"""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp

from specdec_jax import arrays
from specdec_jax.base import Draft, Drafter, LanguageModel, Tree, Verification
from specdec_jax.sampling import distributions, logits
from specdec_jax.verification import decision
from specdec_jax.verification.block import decide as decide_block
from specdec_jax.verification.decision import Decision
from specdec_jax.verification.speculative_sampling import decide as decide_token
from specdec_jax.verification.traversal import decide as decide_tree


def as_verify_fn(decide) -> Callable:
  """A rule as the loop takes it."""
  return lambda row_keys, draft, target_probs: decision.verify(
    decide, row_keys, draft, target_probs
  )


def as_tree_rule(decide, tree: Tree) -> Callable:
  """A rule for trees as the loop takes it."""
  decide = functools.partial(decide, tree=tree)
  return lambda row_keys, draft, target_probs: decision.verify(
    decide, row_keys[0], draft, target_probs
  )


def argmax_correction(uniforms, draft: Draft, target_probs) -> Decision:
  """After a rejection comes the residual's likeliest token, not a draw."""
  made = decide_token(uniforms, draft, target_probs)
  best = jnp.argmax(made.next_probs, axis=-1)
  one_hot = jax.nn.one_hot(best, made.next_probs.shape[-1], dtype=jnp.float32)
  is_rejected = made.num_accepted < draft.lengths
  return made.replace(
    next_probs=jnp.where(is_rejected[:, None], one_hot, made.next_probs)
  )


def resample_from_p(uniforms, draft: Draft, target_probs) -> Decision:
  """After a rejection comes a draw from p, not from the residual."""
  made = decide_token(uniforms, draft, target_probs)
  p = decision.probs_at(target_probs, made.num_accepted)
  return made.replace(next_probs=p)


def residual_after_acceptance(uniforms, draft: Draft, target_probs) -> Decision:
  """The residual follows an accepted draft too, in place of p."""
  made = decide_token(uniforms, draft, target_probs)
  p = decision.probs_at(target_probs, made.num_accepted)
  q = decision.probs_at(draft.probs, made.num_accepted)
  return made.replace(next_probs=distributions.residual(p, q))


def lenient(uniforms, draft: Draft, target_probs) -> Decision:
  """Lenience 0.9, passed off as exact."""
  return decide_token(uniforms, draft, target_probs, lenience=0.9)


def block_stops_early(uniforms, draft: Draft, target_probs) -> Decision:
  """Block verification that gives up at the first failure."""
  made = decide_block(uniforms, draft, target_probs)
  passes = uniforms < made.accept_probs
  num_accepted = jnp.minimum(made.num_accepted, arrays.count_leading(passes))
  p = decision.probs_at(target_probs, num_accepted)
  q = decision.probs_at(draft.probs, num_accepted)
  is_rejected = num_accepted < draft.lengths
  next_probs = jnp.where(is_rejected[:, None], distributions.residual(p, q), p)
  return made.replace(num_accepted=num_accepted, next_probs=next_probs)


def block_unscaled_residual(uniforms, draft: Draft, target_probs) -> Decision:
  """Block verification with the token rule's residual, not scaled by p_tau."""
  made = decide_block(uniforms, draft, target_probs)
  p = decision.probs_at(target_probs, made.num_accepted)
  q = decision.probs_at(draft.probs, made.num_accepted)
  is_rejected = made.num_accepted < draft.lengths
  next_probs = jnp.where(is_rejected[:, None], distributions.residual(p, q), p)
  return made.replace(next_probs=next_probs)


RULES = {
  'argmax correction': argmax_correction,
  'resample from p': resample_from_p,
  'residual after acceptance': residual_after_acceptance,
  'lenience 0.9': lenient,
  'block stops at the first failure': block_stops_early,
  'block residual not scaled': block_unscaled_residual,
}


def traversal_without_norm(
  uniforms, draft: Draft, target_probs, *, tree: Tree
) -> Decision:
  """Later siblings are judged by what was left for them, not brought to sum to
  one."""
  left: dict = {}
  probs = []
  for i, parent in enumerate(tree.parents):
    mass = left.get(parent, jnp.ones_like(target_probs[:, 0, 0]))
    probs.append(draft.probs[:, i] * mass[:, None])
    left[parent] = mass - arrays.pick(probs[-1], draft.tokens[:, i])
  changed = draft.replace(probs=jnp.stack(probs, axis=1))
  return decide_tree(uniforms, changed, target_probs, tree=tree)


def reused_draw(row_keys, draft: Draft, target_probs) -> Verification:
  """The draw that accepted or rejected also picks the token that follows."""
  accept_keys, _ = decision.split_by_purpose(row_keys)
  uniforms = distributions.uniforms(accept_keys, draft.tokens.shape[1])
  made = decide_token(uniforms, draft, target_probs)
  last = jnp.minimum(made.num_accepted, draft.tokens.shape[1] - 1)
  draw = arrays.pick(uniforms, last)
  mass = jnp.cumsum(made.next_probs, axis=-1)
  next_token = jnp.sum(mass <= draw[:, None] * mass[:, -1:], axis=-1)
  return Verification(
    num_accepted=made.num_accepted,
    next_token=next_token.astype(jnp.int32),
    accept_probs=made.accept_probs,
  )


def reused_key(row_keys, draft: Draft, target_probs) -> Verification:
  """Acceptance and the next token draw from one key."""
  accept_keys, _ = decision.split_by_purpose(row_keys)
  uniforms = distributions.uniforms(accept_keys, draft.tokens.shape[1])
  made = decide_token(uniforms, draft, target_probs)
  return Verification(
    num_accepted=made.num_accepted,
    next_token=distributions.sample(accept_keys, made.next_probs),
    accept_probs=made.accept_probs,
  )


VERIFY_FNS = {name: as_verify_fn(rule) for name, rule in RULES.items()} | {
  'accept draw reused': reused_draw,
  'accept key reused': reused_key,
}


def drafter(
  model: LanguageModel,
  *,
  gamma: int,
  drawn_from=None,
  reported=None,
  num_fed: int = 2,
) -> Drafter:
  """Drafts from one distribution and reports another; right if both are one.

  Args:
    model: the drafter's model.
    gamma: tokens per iteration.
    drawn_from: logits to the distribution of tokens; None: softmax.
    reported: logits to what is handed over as q; None: softmax.
    num_fed: committed tokens that are fed again; 1 leaves a hole in the cache
      after a draft that was accepted whole.
  """
  drawn_from = drawn_from or logits.standardize()
  reported = reported or logits.standardize()

  def propose(params, row_keys, context, cache):
    starts = jnp.maximum(context.lengths - num_fed, 0)
    tokens = arrays.read_block(context.tokens, starts, num_fed)
    scores, cache = model.extend(params, tokens, model.rewind(cache, starts))
    last = context.lengths - 1 - starts
    scores = jnp.take_along_axis(scores, last[:, None, None], axis=1)[:, 0]
    cache = model.rewind(cache, context.lengths)
    tokens, probs = [], []
    for i in range(gamma):
      keys = jax.vmap(jax.random.fold_in, (0, None))(row_keys, i)
      tokens.append(distributions.sample(keys, drawn_from(scores)))
      probs.append(reported(scores))
      if i == gamma - 1:
        break
      scores, cache = model.extend(params, tokens[-1][:, None], cache)
      scores = scores[:, 0]
    draft = Draft(
      tokens=jnp.stack(tokens, axis=1),
      probs=jnp.stack(probs, axis=1),
      lengths=jnp.full_like(context.lengths, gamma),
    )
    return draft, cache

  return Drafter(gamma, model.init, propose)


DRAFTERS = {
  'argmax draft, softmax q': lambda model, gamma: drafter(
    model, gamma=gamma, drawn_from=logits.standardize(temperature=0)
  ),
  'top-k draft, raw q': lambda model, gamma: drafter(
    model, gamma=gamma, drawn_from=logits.standardize(top_k=2)
  ),
  'cold draft, warm q': lambda model, gamma: drafter(
    model, gamma=gamma, drawn_from=logits.standardize(temperature=0.8)
  ),
}


def never_rewound(model: LanguageModel) -> LanguageModel:
  """Rejected tokens stay in the cache."""
  return model._replace(rewind=lambda cache, lengths: cache)


def rewound_too_far(model: LanguageModel) -> LanguageModel:
  """A cache that forgets one committed token more than it should."""
  return model._replace(
    rewind=lambda cache, lengths: model.rewind(
      cache, jnp.maximum(lengths - 1, 0)
    )
  )


TARGETS = {
  'cache never rewound': never_rewound,
  'cache rewound one too far': rewound_too_far,
}


def positions_by_index(model: LanguageModel) -> LanguageModel:
  """The nodes of a tree stand one behind the other, siblings too."""

  def extend(params, tokens, cache, at=None, placement=None):
    if placement is not None:
      entries = jnp.arange(placement.mask.shape[2], dtype=jnp.int32)
      placement = placement.replace(
        positions=arrays.block_positions(cache.lengths, tokens.shape[1]),
        key_positions=entries[None],
      )
    return model.extend(params, tokens, cache, at, placement=placement)

  return model._replace(extend=extend)


def siblings_seen(model: LanguageModel) -> LanguageModel:
  """A node sees all that was written before it, as a token of a text does."""

  def extend(params, tokens, cache, at=None, placement=None):
    if placement is not None:
      entries = arrays.block_positions(cache.lengths, tokens.shape[1])
      every = jnp.arange(placement.mask.shape[2], dtype=jnp.int32)
      mask = every[None, None] <= entries[:, :, None]
      placement = placement.replace(mask=mask)
    return model.extend(params, tokens, cache, at, placement=placement)

  return model._replace(extend=extend)


def gathered_off_by_one(model: LanguageModel) -> LanguageModel:
  """Every entry of the accepted path comes from the node after it."""
  return model._replace(
    gather=lambda cache, starts, offsets, span: model.gather(
      cache, starts, offsets + 1, span
    )
  )


# Models that are right as long as drafts are chains.
WITH_TREES = {
  'positions by index': positions_by_index,
  'siblings seen': siblings_seen,
  'gather off by one': gathered_off_by_one,
}
