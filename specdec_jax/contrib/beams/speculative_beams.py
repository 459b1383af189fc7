"""Speculative beam search: the sequences of beam search in fewer target calls.

Leviathan et al. sketch it (https://arxiv.org/abs/2211.17192, A.4). Here a trie
is drafted below all live sequences, one target call scores them and all nodes,
and the search's own step (`beam_search.advance`) is replayed level by level as
long as every live sequence is a node. The result is that of plain beam search,
whatever was drafted, up to the rounding of calls of another width.
"""

import dataclasses

import jax
import jax.numpy as jnp

from specdec_jax import arrays, base
from specdec_jax.base import Array, Arrays, Params
from specdec_jax.contrib.beams import beam_search, beam_trie
from specdec_jax.contrib.beams.beam_search import BeamOutput, Rules, Search
from specdec_jax.contrib.beams.beam_trie import BeamDraft, BeamDrafter, Beams
from specdec_jax.decoding import state as state_lib
from specdec_jax.decoding import statistics
from specdec_jax.decoding.state import EosId
from specdec_jax.decoding.statistics import Statistics


@base.value
class State:
  """Everything the next iteration needs; `cache` is the target's, with one row
  per row of the search."""

  beams: Beams
  cache: Arrays
  drafter_state: Arrays
  statistics: Statistics


@base.value
class _Replay:
  """The search after some of the steps that one target call allows.

  Attributes:
    search: the search so far.
    sees: bool `[B, K, C]`, entries of the live sequences after `gather`.
    depth: int32, the steps so far, which is the level of the next.
    is_due: bool `[B]`, rows whose live sequences are all nodes of that level.
    nodes: int32 `[B, K]`, the live sequences as nodes of that level; on level
      0, as sequences.
    kept_nodes: int32 `[B, G, K]`, the kept nodes of each drafted level, in
      ascending order.
  """

  search: Search
  sees: Array
  depth: Array
  is_due: Array
  nodes: Array
  kept_nodes: Array


def generate(
  params: Params,
  prompt: base.Prompt,
  *,
  target: base.LanguageModel,
  drafter: BeamDrafter,
  num_beams: int,
  alpha: float = 0.6,
  max_len: int,
  eos_id: EosId,
  vocab_size: int | None = None,
  max_new_tokens: int | None = None,
) -> BeamOutput:
  """Finds the `num_beams` best sequences of every row, with one target call for
  several steps; jit the whole call.

  A row stops at its limit, or when no live sequence can still beat the worst
  finished one. One beam need not equal greedy decoding: a sequence that ends
  early may outscore the greedy one.

  Args:
    params: weights of target and drafter.
    prompt: what to continue.
    target: a model that takes placements.
    drafter: from `contrib.beams.beam_drafters`; changes the speed, not the
      result.
    num_beams: K.
    alpha: exponent of the brevity penalty; 0 compares log-probabilities.
    max_len: S, the most tokens a row can have, prompt included.
    eos_id: ends a sequence; a tuple lists several, -1 or () none.
    vocab_size: ids from here on are never chosen; None allows all.
    max_new_tokens: a limit for all rows; it makes caches smaller if prompts are
      long.

  Raises:
    ValueError: if a number is out of range, the prompt has no rows or exceeds
      `max_len`, `target` takes no placements, or a level of the draft has fewer
      nodes than there are beams.
  """
  rules = beam_search.checked_rules(
    target, num_beams, alpha, eos_id, vocab_size
  )
  prompt = state_lib.checked(prompt, max_len)
  state = init(
    params,
    prompt,
    target=target,
    drafter=drafter,
    num_beams=num_beams,
    max_len=max_len,
    max_new_tokens=max_new_tokens,
  )
  state = run(params, state, target=target, drafter=drafter, rules=rules)
  return beam_search.output(
    state.beams.search, prompt.decoder_lengths, state.statistics
  )


def init(
  params: Params,
  prompt: base.Prompt,
  *,
  target: base.LanguageModel,
  drafter: BeamDrafter,
  num_beams: int,
  max_len: int,
  max_new_tokens: int | None = None,
) -> State:
  """Runs the encoder and prefills both models; see `generate`."""
  if target.gather is None:
    raise ValueError(
      'this target takes no placements, by which the beams of a row share '
      'its cache'
    )
  if drafter.width < num_beams:
    raise ValueError(
      f'levels of {drafter.width} nodes cannot hold {num_beams} beams: draft '
      'at least as many'
    )
  limits = state_lib.limits(prompt, max_len, max_new_tokens)
  prompt = dataclasses.replace(prompt, max_lengths=limits)
  batch_size, prompt_len = prompt.decoder_tokens.shape
  capacity = beam_trie.capacity(
    num_beams,
    drafter,
    max_len=max_len,
    prompt_len=prompt_len,
    max_new_tokens=max_new_tokens,
  )
  cache = target.init(params.target, prompt, capacity)
  num_prompt = prompt.decoder_lengths - 1
  sees = arrays.is_within(num_prompt, cache.capacity)[:, None]
  beams = Beams(
    search=beam_search.start(prompt, num_beams=num_beams, max_len=max_len),
    num_prompt=num_prompt,
    sees=jnp.repeat(sees, num_beams, axis=1),
  )
  return State(
    beams=beams,
    cache=cache,
    drafter_state=drafter.init(params.drafter, prompt, cache.capacity),
    statistics=statistics.init(batch_size, drafter.gamma),
  )


def run(
  params: Params,
  state: State,
  *,
  target: base.LanguageModel,
  drafter: BeamDrafter,
  rules: Rules,
) -> State:
  """Drafts, scores and replays until no row is active, in one
  `lax.while_loop`."""

  def iterate(state: State) -> State:
    with jax.named_scope('draft'):
      draft, drafter_state = drafter.propose(
        params.drafter, state.beams, state.drafter_state
      )
    state = dataclasses.replace(state, drafter_state=drafter_state)
    return _judge(params.target, state, draft, target, drafter, rules)

  return jax.lax.while_loop(
    lambda state: jnp.any(state.beams.search.is_active), iterate, state
  )


def _judge(
  params: Arrays,
  state: State,
  draft: BeamDraft,
  target: base.LanguageModel,
  drafter: BeamDrafter,
  rules: Rules,
) -> State:
  """Scores a draft, replays the steps that it allows, and keeps the cache
  entries of live sequences."""
  beams = state.beams
  with jax.named_scope('verify'):
    tokens, placement = beam_trie.laid_out(beams, draft)
    logits, cache = target.extend(
      params, tokens, state.cache, placement=placement
    )
    replay = _replayed(beams, draft, logits, rules)
  new = dataclasses.replace(beams, search=replay.search, sees=replay.sees)
  with jax.named_scope('commit'):
    drafter_state, num_entries = state.drafter_state, new.num_entries
    batch_size, gamma, width = draft.tokens.shape
    # Two beams that followed nodes 0 and 2 of 3 on level 0, and 1 and 2 on
    # level 1: offsets [0, 2, 3 + 1, 3 + 2] move their entries together.
    if gamma and target.gather is not None:
      starts = beams.num_entries + rules.num_beams
      levels = width * jnp.arange(gamma, dtype=jnp.int32)
      offsets = (levels[None, :, None] + replay.kept_nodes).reshape(
        batch_size, -1
      )
      cache = target.gather(cache, starts, offsets, gamma * width)
      drafter_state = drafter.keep(drafter_state, starts, offsets, num_entries)
    cache = target.rewind(cache, num_entries)
  counted = _count(state.statistics, beams.search, new.search, draft)
  return State(
    beams=new, cache=cache, drafter_state=drafter_state, statistics=counted
  )


def _replayed(
  beams: Beams, draft: BeamDraft, logits: Array, rules: Rules
) -> _Replay:
  """Replays the search on `logits[B, K + G * U, V]`: one step, and more while
  every live sequence is a node."""
  batch_size, gamma, width = draft.tokens.shape
  num_beams, capacity = beams.sees.shape[1:]
  order = jnp.arange(num_beams, dtype=jnp.int32)
  starts = beams.num_entries

  def decide(replay: _Replay) -> _Replay:
    depth, nodes = replay.depth, replay.nodes
    # With 2 beams and levels of 3, logits 0 and 1 are of the pending tokens, 2
    # to 4 of level 0, 5 to 7 of level 1.
    first = jnp.where(depth > 0, num_beams + (depth - 1) * width, 0)
    search, parents, is_taken = beam_search.advance(
      replay.search, arrays.take(logits, first + nodes), replay.is_due, rules
    )
    # Nodes keep their order: nodes [2, 0] have [1, 0] before them, so at depth
    # 1 with 2 beams they go to entries 3 and 2 from `starts` on.
    is_before = nodes[:, None, :] < nodes[:, :, None]
    places = depth * num_beams + jnp.sum(is_before, axis=2, dtype=jnp.int32)
    is_new_entry = beam_trie.is_at(starts[:, None] + places, capacity)
    sees = arrays.take(replay.sees | is_new_entry, parents)
    tokens = beam_search.last_tokens(search.live, search.lengths)
    next_nodes, is_node = _find(
      draft, depth, arrays.take(nodes, parents), tokens
    )
    is_due = is_taken & search.is_active & is_node
    is_level = jnp.arange(gamma, dtype=jnp.int32)[None, :, None] == depth
    return _Replay(
      search=search,
      sees=jnp.where(is_taken[:, None, None], sees, replay.sees),
      depth=depth + 1,
      is_due=is_due,
      nodes=next_nodes,
      kept_nodes=jnp.where(
        is_due[:, None, None] & is_level,
        jnp.sort(next_nodes, axis=1)[:, None, :],
        replay.kept_nodes,
      ),
    )

  return jax.lax.while_loop(
    lambda replay: jnp.any(replay.is_due),
    decide,
    _Replay(
      search=beams.search,
      sees=beams.sees,
      depth=jnp.zeros((), jnp.int32),
      is_due=beams.search.is_active,
      nodes=jnp.broadcast_to(order, (batch_size, num_beams)),
      kept_nodes=jnp.broadcast_to(order, (batch_size, gamma, num_beams)),
    ),
  )


def _find(
  draft: BeamDraft, depth: Array, parents: Array, tokens: Array
) -> tuple[Array, Array]:
  """Finds live sequences among the nodes of the level below `depth`.

  `parents[B, K]` are their nodes on level `depth`, and `tokens[B, K]` the
  tokens that continue them. Returns their nodes, int32 `[B, K]`, and whether
  all live sequences of a row are nodes, bool `[B]`; false below the last level.
  """

  def level(values: Array) -> Array:
    # One more level without nodes: no sequence continues below the last one.
    ended = jnp.pad(values, ((0, 0), (0, 1), (0, 0)), constant_values=-1)
    return jax.lax.dynamic_index_in_dim(ended, depth, 1)  # [B, 1, U]

  is_node = (level(draft.parents) == parents[:, :, None]) & (
    level(draft.tokens) == tokens[:, :, None]
  )
  # Siblings have different tokens, so that at most one node matches.
  node = arrays.argmax(is_node.astype(jnp.int32))
  return node, jnp.all(jnp.any(is_node, axis=2), axis=1)


def _count(
  before: Statistics, search: Search, new: Search, draft: BeamDraft
) -> Statistics:
  """Counts a call; a level of the draft counts as a token."""
  gamma = before.num_tested.shape[1]
  num_steps = new.lengths - search.lengths
  num_accepted = jnp.maximum(num_steps - 1, 0)
  num_drafted = arrays.count_leading(jnp.any(draft.parents >= 0, axis=2))
  # A level that fails was tested, unless the search ended before it: of 3
  # levels with 1 accepted, 2 are tested.
  fails = new.is_active & (num_accepted < num_drafted)
  num_tested = num_accepted + fails.astype(jnp.int32)
  reach = lambda lengths: arrays.is_within(lengths, gamma).astype(jnp.int32)
  return dataclasses.replace(
    before,
    num_target_runs=before.num_target_runs + (num_steps > 0).astype(jnp.int32),
    num_drafted=before.num_drafted
    + jnp.where(fails, num_drafted, num_accepted),
    num_tested=before.num_tested + reach(num_tested),
    num_accepted=before.num_accepted + reach(num_accepted),
  )
