"""The types that draft, verify and decode share.

Shape letters used throughout the package: `B` rows of the batch, `S` a token
buffer, `P` a prompt buffer, `E` the encoder's length, `G` gamma (the static
maximum of drafted tokens per iteration), `T` tokens of one model call, `V` the
vocabulary. Values are frozen dataclasses that state their shapes; bundles of
functions are `NamedTuple`s; no type here has behaviour.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple, dataclass_transform

import jax

Array = jax.Array
# A tree of arrays whose structure its owner alone knows: weights, a cache, the
# state of a drafter.
Arrays = Any


@dataclass_transform(frozen_default=True, kw_only_default=True)
def value(cls: type) -> type:
  """Makes a frozen dataclass of arrays that jax's transformations see through.

  It is `flax.struct.dataclass`, whose import would bring all of flax.linen.
  """
  cls = dataclasses.dataclass(frozen=True, kw_only=True)(cls)
  setattr(cls, 'replace', dataclasses.replace)  # noqa: B010
  return jax.tree_util.register_dataclass(cls)


@value
class Sampling:
  """How each row is sampled, as data, so that one program serves all values.

  Attributes:
    temperature: float32 `[B]`; 0 takes the argmax.
    top_k: int32 `[B]`; V or more keeps all.
    top_p: float32 `[B]`; 1 keeps all.
    min_p: float32 `[B]`; 0 keeps all.
    typical_p: float32 `[B]`; 1 keeps all.
  """

  temperature: Array
  top_k: Array
  top_p: Array
  min_p: Array
  typical_p: Array


@value
class Processors:
  """How logits of each row depend on the text before them, as data.

  Attributes:
    repetition: float32 `[B]`, divides the positive logits of all ids in the
      text, prompt included, and multiplies the negative ones; 1 changes none.
    presence: float32 `[B]`, is subtracted for ids among the new tokens.
    frequency: float32 `[B]`, is subtracted as often as an id is there.
    ngram_size: int32 `[B]`: no n-gram of so many tokens comes twice; 0: any.
    encoder_repetition: float32 `[B]`: the reverse of `repetition`, for ids that
      the encoder read, or else the prompt has.
    encoder_ngram_size: int32 `[B]`: none of those comes again.
    encoder_tokens: int32 `[B, E]`, those of the prompt.
    sequences: int32 `[B, K, L]`: the last id has a bias where those before it
      end the text. Shorter ones have -1 in front; of -1 alone there is none.
    biases: float32 `[B, K]`, finite or -infinity.
    until: int32 `[B, K]`: the bias is for texts of fewer new tokens.
    forced: int32 `[B, F]`, ids that come whatever the logits are.
    forced_at: int32 `[B, F]`: where they come, counted from the prompt's first.
  """

  repetition: Array
  presence: Array
  frequency: Array
  ngram_size: Array
  encoder_repetition: Array
  encoder_ngram_size: Array
  encoder_tokens: Array | None
  sequences: Array
  biases: Array
  until: Array
  forced: Array
  forced_at: Array


@value
class Grammar:
  """The texts that rows may have, as one automaton over tokens for each.

  Attributes:
    classes: uint16 `[B, V]`: tokens of one class lead to the same states.
    next: uint16 `[B, S, C]`: the state behind a state and a token of a class; 0
      where there is none. In state 0 any token may come, and leads to it again.
    guesses: int32 `[B, S]`: the only token that may come, or where one text
      alone may, the likeliest; -1 elsewhere.
    states: int32 `[B]`, of the committed text.
  """

  classes: Array
  next: Array
  guesses: Array
  states: Array


@value
class Prompt:
  """What decoding starts from, rows right-padded.

  Attributes:
    encoder_tokens: int32 `[B, E]`, or None for decoder-only models. Id 0 is
      padding.
    decoder_tokens: int32 `[B, P]`: the prompt of a decoder-only model, the
      start token of an encoder-decoder.
    decoder_lengths: int32 `[B]`, at least 1: how much of each row is prompt.
    row_ids: int32 `[B]`: names the row. A row's random draws depend on
      `(rng_key, row_id)` and on nothing else, whatever batch it is in.
    max_lengths: int32 `[B]` or None: a row's own limit on its committed length,
      prompt included. None means the `max_len` of the call for every row.
    sampling: how each row is sampled; None leaves it to the program.
    processors: what changes logits before that; None: nothing, at no cost.
    grammar: which tokens may come at all, likewise.
  """

  encoder_tokens: Array | None
  decoder_tokens: Array
  decoder_lengths: Array
  row_ids: Array
  max_lengths: Array | None = None
  sampling: Sampling | None = None
  processors: Processors | None = None
  grammar: Grammar | None = None


@value
class Context:
  """The committed tokens of every row, prompt included.

  Attributes:
    tokens: int32 `[B, S]`; what lies at or beyond `lengths` means nothing.
    lengths: int32 `[B]`.
    sampling: the prompt's, for target and drafter alike.
    processors: likewise.
    starts: int32 `[B]`, lengths of the prompts, if there are processors.
    grammar: the prompt's, with the states of what is committed.
  """

  tokens: Array
  lengths: Array
  sampling: Sampling | None = None
  processors: Processors | None = None
  starts: Array | None = None
  grammar: Grammar | None = None


@value
class Draft:
  """What a drafter guesses to come next.

  Attributes:
    tokens: int32 `[B, G]`; of a tree, those of its nodes 1 .. N, and G is N.
    probs: float32 `[B, G, V]`, the very array that each token was drawn from;
      None for a deterministic drafter, whose distribution is one-hot and is
      never materialised. Of a tree's siblings, drawn without replacement, each
      has what was left after those before it, zeros where nothing was: such a
      node is never accepted.
    lengths: int32 `[B]`, 0 to G: tokens beyond it are not proposed. A tree is
      proposed whole or not at all.
  """

  tokens: Array
  probs: Array | None
  lengths: Array


@value
class Verification:
  """What the target makes of a draft.

  Attributes:
    num_accepted: int32 `[B]`, 0 to `draft.lengths`; of a tree 0 to D.
    next_token: int32 `[B]`: the correction, or the bonus token when the whole
      draft was accepted.
    accept_probs: float32 `[B, G]`: the threshold that each drafted token's
      uniform draw was held against, 0 beyond `draft.lengths`.
    uniforms: float32 `[B, G]`, those draws; None from a rule that draws none.
    path: int32 `[B, D]`, of a tree of depth D: the node at each depth of the
      accepted path, 0 beyond it. None for a chain.
  """

  num_accepted: Array
  next_token: Array
  accept_probs: Array
  uniforms: Array | None = None
  path: Array | None = None


@dataclasses.dataclass(frozen=True)
class Tree:
  """The shape of a draft that branches, static; `trees` has its arithmetic.

  Node 0 is the root, the pending token; nodes 1 .. N are drafted. Nodes are in
  breadth-first order, so that the nodes of a depth stand together, and children
  of one node are in the order of their rank, the likeliest first.

  Attributes:
    parents: of nodes 1 .. N: `parents[i]` is the parent of node i + 1. A chain
      of G tokens is `tuple(range(G))`.
  """

  parents: tuple[int, ...]


@value
class Placement:
  """Where the tokens of a call stand and what they see, unless they are a run
  of text behind all that the cache holds.

  They are written at `cache.lengths + t` all the same.

  Attributes:
    positions: int32 `[B, T]`, of the tokens, for rotary or relative positions.
    key_positions: int32 `[B or 1, S]`, of all entries of the cache, the T new
      ones included.
    mask: bool `[B, T, S]`, true where a token may look, itself included; a
      layer's window comes on top, by these positions.
  """

  positions: Array
  key_positions: Array
  mask: Array


class Params(NamedTuple):
  """Weights of both sides; `drafter` is `()` when the drafter has none."""

  target: Arrays
  drafter: Arrays = ()


LogitsToProbsFn = Callable[..., Array]
"""Standardised sampling (Leviathan et al., Sec. 2.2): `(logits[B, ..., V],
sampling=None) -> probs`, the float32 `[B, ..., V]` that are drawn from; the
`Sampling` is that of the context."""

VerifyFn = Callable[[Array, Draft, Array], Verification]
"""`(row_keys[B], draft, target_probs[B, G+1, V]) -> Verification`: accepts a
prefix of each row's draft and draws the token after it. `target_probs` are the
target's distributions after the context and after each drafted token.

The rule for a tree of depth D takes keys `[D+1, B]`: those of the committed
lengths from the context's to D more, so that it can draw at each depth what
plain decoding draws there. Its `target_probs` are `[B, N+1, V]`, after each
node, and with empty drafts `[B, 1, V]`."""


class LanguageModel(NamedTuple):
  """A language model with a cache, as pure functions.

  Attributes:
    init: `(params, prompt, max_len) -> cache`: encoder pass and prefill of all
      of the prompt but its last token, with room for `max_len` positions.
    extend: `(params, tokens[B, T], cache, at=None, placement=None) -> (logits,
      cache)`: float32 `[B, T, V]`, of what follows each appended token, or
      `[B, 1, V]`, of the one at `at[B]`: the projection to V is most of a small
      model. A `placement`, by keyword, is for tokens that are no run of text.
    rewind: `(cache, lengths[B]) -> cache`: sets how many positions of each row
      count; nothing is erased. A target is rewound to a length within its last
      call, or to that before it, and no further, so that a recurrent network
      can be one; a draft model goes back over the calls of its last draft. A
      cache with an attribute `lengths` has them there: a draft model of a lone
      row then catches up faster on a CPU.
    vocab_size: V, the last axis of the logits.
    gather: `(cache, starts[B], offsets[B, D], span) -> cache`: what lies at
      entries `starts + offsets[:, i]` moves to `starts + i`, all of it read
      before any is written; lengths stay. `span`, static, is the number of
      entries among which they lie: of a tree, its nodes. A path becomes a run
      of text so: `starts` is the entry after the root's, and `offsets` are the
      path's nodes less 1; beyond the path they may be anything. What else a
      cache has of each token of the last call, as features, moves along, and
      the root's stays in front. None: the model takes no placements; with it, a
      cache has `capacity`, the S of a placement.
  """

  init: Callable[[Arrays, Prompt, int], Arrays]
  extend: Callable[..., tuple[Array, Arrays]]
  rewind: Callable[[Arrays, Array], Arrays]
  vocab_size: int
  gather: Callable[[Arrays, Array, Array, int], Arrays] | None = None


class Drafter(NamedTuple):
  """A source of guesses, as a pair of pure functions.

  Attributes:
    gamma: the most tokens a call proposes, static; of a tree, its nodes.
    init: `(params, prompt, max_len) -> state`; no context will be longer than
      `max_len`.
    propose: `(params, row_keys[B], context, state) -> (Draft, state)`. The keys
      are this call's own. It is told nothing of what was accepted: it reads
      `context.lengths` and rewinds itself.
    may_abstain: whether `Draft.lengths` can be 0 before a row is finished. The
      loop then also compiles a one-position target call, and an iteration in
      which no row drafts costs no more than a plain one.
    reads_target_cache: whether both functions are given the target's cache as a
      last argument. `init` gets it as the prefill left it, and returns
      `(state, target_cache)`, the cache that the loop goes on with; `propose`
      reads what the last target call left in it.
    tree: the shape of every draft; None for a chain.
    read: `(params, context, state, width) -> state`, `width` by keyword: takes
      in the `width` tokens before the context's last, which need not be what
      was decoded, and leaves the state as `init` does. It is given the target's
      cache, too, if the others are. None: nothing of the text is remembered.
  """

  gamma: int
  init: Callable[..., Arrays]
  propose: Callable[..., tuple[Draft, Arrays]]
  may_abstain: bool = False
  reads_target_cache: bool = False
  tree: Tree | None = None
  read: Callable[..., Arrays] | None = None
