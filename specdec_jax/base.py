"""The types that drafters, verification rules and decoding loops share.

Shape letters used throughout the package: `B` rows of the batch, `S` a token
buffer, `P` a prompt buffer, `E` the encoder's input, `G` gamma (the most tokens
drafted per iteration, static), `T` tokens of one model call, `V` the
vocabulary. Values are frozen dataclasses that state their shapes; bundles of
functions are `NamedTuple`s; no type here has behaviour.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple, dataclass_transform

import jax

Array = jax.Array
# A pytree of arrays whose structure only its owner knows: weights, a cache, the
# state of a drafter.
Arrays = Any


@dataclass_transform(frozen_default=True, kw_only_default=True)
def value(cls: type) -> type:
  """Makes a frozen, keyword-only dataclass and registers it as a pytree.

  Works as `flax.struct.dataclass`, which would import all of flax.linen.
  """
  cls = dataclasses.dataclass(frozen=True, kw_only=True)(cls)
  setattr(cls, 'replace', dataclasses.replace)  # noqa: B010
  return jax.tree_util.register_dataclass(cls)


@value
class Sampling:
  """How each row is sampled, as arrays: one program serves all settings.

  Attributes:
    temperature: float32 `[B]`; 0 takes the argmax.
    top_k: int32 `[B]`; V or more keeps all tokens.
    top_p: float32 `[B]`; 1 keeps all tokens.
    min_p: float32 `[B]`; 0 keeps all tokens.
    typical_p: float32 `[B]`; 1 keeps all tokens.
  """

  temperature: Array
  top_k: Array
  top_p: Array
  min_p: Array
  typical_p: Array


@value
class Processors:
  """How each row's logits depend on the text before them, as arrays.

  Attributes:
    repetition: float32 `[B]`: divides positive and multiplies negative logits
      of ids that occur in the text, prompt included; 1 changes nothing.
    presence: float32 `[B]`, subtracted once for each id among the new tokens.
    frequency: float32 `[B]`, subtracted once per occurrence among them.
    ngram_size: int32 `[B]`: no n-gram of this many tokens repeats; 0 is off.
    encoder_repetition: float32 `[B]`: above 1 it favours the ids of the source,
      which is what the encoder read or, without an encoder, the prompt.
    encoder_ngram_size: int32 `[B]`: no n-gram of the source is repeated.
    encoder_tokens: int32 `[B, E]`, the prompt's; None without an encoder.
    sequences: int32 `[B, K, L]`: the last id gets a bias where the text ends in
      the ids before it. Short ones start with -1; all -1 is no sequence.
    biases: float32 `[B, K]`, finite or -infinity.
    until: int32 `[B, K]`: a bias applies to texts of fewer new tokens.
    forced: int32 `[B, F]`, ids chosen whatever the logits are; -2 rules out
      all ids at its position, where one is forced and suppressed.
    forced_at: int32 `[B, F]`, their positions, counted from the prompt's start.
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
  """The texts each row may have, as grammars that the host knows.

  Attributes:
    numbers: int32 `[B]`, the rows' grammars; 0 allows any text.
    read: what reads them, static: a `text.grammars.Reader`, or anything that is
      called so. Its vocabulary is the target's, V.
  """

  numbers: Array
  read: Callable[..., tuple[Any, ...]] = dataclasses.field(
    metadata={'static': True}
  )


@value
class Prompt:
  """What decoding starts from; rows are right-padded.

  Attributes:
    encoder_tokens: int32 `[B, E]`, or None for decoder-only models. Id 0 is
      padding.
    decoder_tokens: int32 `[B, P]`: the prompt of a decoder-only model, the
      start token of an encoder-decoder.
    decoder_lengths: int32 `[B]`, at least 1: how much of each row is prompt.
    row_ids: int32 `[B]`, names of the rows. A row's random draws depend on
      `(rng_key, row_id)` alone, whatever batch the row is in.
    max_lengths: int32 `[B]`, each row's limit on its committed length, prompt
      included. None stands for the call's `max_len` in every row.
    sampling: how each row is sampled; None leaves it to the program.
    processors: what changes logits before sampling; None costs nothing.
    grammar: which tokens are allowed; None costs nothing.
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
    tokens: int32 `[B, S]`; entries at or beyond `lengths` are meaningless.
    lengths: int32 `[B]`.
    sampling: the prompt's, for target and drafter alike.
    processors: the prompt's, likewise.
    starts: int32 `[B]`, the prompts' lengths; None without processors and
      grammar.
    grammar: the prompt's.
  """

  tokens: Array
  lengths: Array
  sampling: Sampling | None = None
  processors: Processors | None = None
  starts: Array | None = None
  grammar: Grammar | None = None


@value
class Draft:
  """The tokens a drafter proposes.

  Attributes:
    tokens: int32 `[B, G]`; for a tree, those of nodes 1 .. N, with G = N. An id
      outside 0 .. V - 1 is no token, as -1 where a copier pads: a chain ends
      before it, and in a tree its node and those below are never accepted.
    probs: float32 `[B, G, V]`, the very array each token was drawn from. None
      for a deterministic drafter: q is one-hot and never materialised. Siblings
      in a tree are drawn without replacement: each has the distribution that
      its elder siblings left, all zeros if they left nothing, and such a node
      is never accepted.
    lengths: int32 `[B]`, 0 to G: tokens beyond it are not proposed; the loop
      and the rules take more than G for G. A tree is proposed whole or not at
      all.
  """

  tokens: Array
  probs: Array | None
  lengths: Array


@value
class Verification:
  """The verdict of a verification rule on a draft.

  Attributes:
    num_accepted: int32 `[B]`, 0 to `draft.lengths`; for a tree 0 to D.
    next_token: int32 `[B]`: the correction, or the bonus token if the whole
      draft was accepted.
    accept_probs: float32 `[B, G]`: the threshold each drafted token's uniform
      draw was compared with, 0 beyond `draft.lengths`.
    uniforms: float32 `[B, G]`, those draws; None from a rule that draws none.
    path: int32 `[B, D]`, for a tree of depth D: the accepted node at each
      depth, 0 beyond the path. None for a chain.
  """

  num_accepted: Array
  next_token: Array
  accept_probs: Array
  uniforms: Array | None = None
  path: Array | None = None


@dataclasses.dataclass(frozen=True)
class Tree:
  """The static shape of a draft that branches; see the module `trees`.

  Node 0 is the root, the pending token; nodes 1 .. N are drafted. Nodes are in
  breadth-first order, so the nodes of a depth are adjacent, and the children of
  a node are ordered by rank, the likeliest first.

  Attributes:
    parents: `parents[i]` is the parent of node i + 1. `(0, 0, 1)` has two
      children of the root and one of node 1; a chain is `tuple(range(G))`.
  """

  parents: tuple[int, ...]


@value
class Placement:
  """Positions and attention mask of a call whose tokens, as those of a tree,
  do not simply continue the text in the cache.

  Token t is still written at entry `cache.lengths + t`.

  Attributes:
    positions: int32 `[B, T]`, the tokens' rotary or relative positions.
    key_positions: int32 `[B or 1, S]`, those of all cache entries, the T new
      ones included.
    mask: bool `[B, T, S]`, true where a token attends, itself included. Layers
      with a window also apply it, by these positions.
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
sampling=None) -> probs`, the float32 `[B, ..., V]` that tokens are drawn from;
`sampling` is the context's."""

VerifyFn = Callable[[Array, Draft, Array], Verification]
"""`(row_keys[B], draft, target_probs[B, G+1, V]) -> Verification`: accepts a
prefix of each row's draft and draws the token after it. `target_probs` are the
target's distributions after the context and after each drafted token.

A rule for trees of depth D takes keys `[D+1, B]`, one set per committed length
from the context's to D more, so that it can draw at each depth what plain
decoding draws there. Its `target_probs` are `[B, N+1, V]`, one distribution
after each node; for drafts of width 0 they are `[B, 1, V]`."""


class LanguageModel(NamedTuple):
  """A language model with a cache, as pure functions.

  Attributes:
    init: `(params, prompt, max_len) -> cache`: runs the encoder and prefills
      all of the prompt but its last token, with room for `max_len` positions.
    extend: `(params, tokens[B, T], cache, at=None, placement=None) -> (logits,
      cache)`: appends tokens. Logits are float32 `[B, T, V]`, of what follows
      each of them, or only `[B, 1, V]`, after token `at[B]`: the projection to
      V is most of a small model. `placement`, a keyword, is for trees.
    rewind: `(cache, lengths[B]) -> cache`: sets how many positions of each row
      count; nothing is erased. The loop rewinds a target to a length within its
      last call or just before it, so that a recurrent network can be one; it
      rewinds a draft model across all calls of its last draft. If the cache has
      an attribute `lengths`, a draft model catches up faster on a CPU with B=1.
    vocab_size: V, the last axis of the logits.
    gather: `(cache, starts[B], offsets[B, D], span) -> cache`: moves entry
      `starts + offsets[:, i]` to `starts + i`; all are read before any is
      written, and lengths stay. `span`, static, bounds the offsets: the nodes
      of a tree. So an accepted path becomes a run of text: `starts` is the
      entry after the root's, `offsets` are the path's nodes less 1 (path [2, 5]
      gives [1, 4]), anything beyond it. Whatever else the cache keeps per token
      of the last call, as features, moves along; the root's stays in front.
      None if the model takes no placements; else a cache has `capacity`, the S
      of a placement.
  """

  init: Callable[[Arrays, Prompt, int], Arrays]
  extend: Callable[..., tuple[Array, Arrays]]
  rewind: Callable[[Arrays, Array], Arrays]
  vocab_size: int
  gather: Callable[[Arrays, Array, Array, int], Arrays] | None = None


class Drafter(NamedTuple):
  """A source of drafts, as pure functions.

  Attributes:
    gamma: the most tokens a call proposes, static; for a tree, its nodes.
    init: `(params, prompt, max_len) -> state`; no context will be longer than
      `max_len`.
    propose: `(params, row_keys[B], context, state) -> (Draft, state)`. The keys
      are this call's own. Nothing tells it what was accepted: it reads
      `context.lengths` and rewinds itself.
    may_abstain: whether `Draft.lengths` can be 0 before a row is finished. The
      loop then also compiles a target call of one position, so that an
      iteration in which no row drafts costs a plain step.
    reads_target_cache: whether all functions take the target's cache as a last
      argument. `init` gets it after the prefill and returns `(state,
      target_cache)`, the cache that the loop continues with; `propose` reads
      what the last target call left in it.
    tree: the shape of every draft; None for a chain.
    takes_guesses: whether a row's grammar completes a draft.
    read: `(params, context, state, width) -> state`, `width` by keyword: feeds
      the `width` tokens before the context's last, decoded or not, and leaves
      the state as `init` would. None if the state depends on no token.
  """

  gamma: int
  init: Callable[..., Arrays]
  propose: Callable[..., tuple[Draft, Arrays]]
  may_abstain: bool = False
  reads_target_cache: bool = False
  tree: Tree | None = None
  takes_guesses: bool = True
  read: Callable[..., Arrays] | None = None
