"""EAGLE-3 drafters in miniature: the real network for a tiny Llama, and one
that can be written down, with the ways in which it can be wrong."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from specdec_jax import arrays, drafters
from specdec_jax.base import Array, Drafter, LanguageModel, value
from specdec_jax.drafters.autoregressive import Chain
from specdec_jax.drafters.eagle import EagleModel
from specdec_jax.drafters.features import FeatureCache
from specdec_jax.models.drafting.eagle import EagleConfig
from specdec_jax.models.llama import LlamaConfig
from tests import toy


def config(target: LlamaConfig, **sizes) -> EagleConfig:
  """Sizes for a target: all of its streams, and all but one of its tokens."""
  shared = ('vocab_size', 'embed_dim', 'num_heads', 'num_kv_heads', 'head_dim',
            'mlp_dim', 'dtype')  # fmt: skip
  defaults = {name: getattr(target, name) for name in shared} | {
    'target_embed_dim': target.embed_dim,
    'draft_vocab_size': target.vocab_size - 1,
    'feature_layers': tuple(range(1, target.num_layers + 1)),
    'fc_norm': True,
  }
  return EagleConfig(**(defaults | sizes))


def params(sizes: EagleConfig, *, seed: int, left_out: int = 1):
  """Random weights, as `toy.llama_params` has them; the token `left_out` cannot
  be drafted."""
  own = toy.llama_params(sizes, seed=seed)
  ids = np.delete(np.arange(sizes.vocab_size), left_out)
  if sizes.draft_vocab_size == sizes.vocab_size:
    ids = np.arange(sizes.vocab_size)
  return own | {'target_ids': jnp.asarray(ids, jnp.int32)}


def joined(target_params, own):
  """The drafter's params in the loop."""
  embedder = own if 'token_embedder' in own else target_params
  return {'eagle': own, 'token_embedder': embedder['token_embedder']}


def looped(drafter: Drafter, target: LanguageModel) -> Drafter:
  """The drafter beside a target that scores each block as a loop would, with
  the params of both: for those who have no loop.

  A block is what the context has from the pending token on; what lies beyond
  it stands for tokens that were not accepted.
  """
  width = drafter.gamma + 1

  def init(params, prompt, max_len: int):
    cache = target.init(params.target, prompt, max_len)
    own, cache = drafter.init(params.drafter, prompt, max_len, cache)
    return own, cache, prompt.decoder_lengths

  def propose(params, row_keys, context, state):
    own, cache, before = state
    block = arrays.read_block(context.tokens, before - 1, width)
    cache = target.rewind(cache, before - 1)
    _, extended = target.extend(params.target, block, cache)
    has_moved = context.lengths > before

    def choose(new, old):
      axes = tuple(range(1, new.ndim))
      return jnp.where(jnp.expand_dims(has_moved, axes), new, old)

    cache = jax.tree.map(choose, extended, cache)
    cache = target.rewind(cache, context.lengths - 1)
    draft, own = drafter.propose(params.drafter, row_keys, context, own, cache)
    return draft, (own, cache, context.lengths)

  return Drafter(
    drafter.gamma, init, propose, drafter.may_abstain, tree=drafter.tree
  )


class Counting(NamedTuple):
  """A target, and an EAGLE-3 drafter that would be it if features were known.

  What follows depends on the last token and on the sum of all before it. The
  target's features of a token are its one-hot vector, which the drafter stores
  as a key and sums. Its own guess of the features to come is wrong for every
  other token.
  """

  target: LanguageModel
  network: EagleModel


@value
class _Seen:
  """Tokens, or keys made of features, `[B, S]`, and how many count `[B]`."""

  tokens: Array
  lengths: Array


def counting(vocab_size: int, *, gamma: int, num_drafted: int) -> Counting:
  """Both have params of `toy.toy_params`; ids from `num_drafted` on cannot be
  drafted."""
  width = gamma + 1

  def append(seen: _Seen, tokens: Array) -> _Seen:
    counts = jnp.full_like(seen.lengths, tokens.shape[1])
    return _Seen(
      tokens=arrays.write_block(seen.tokens, tokens, seen.lengths, counts),
      lengths=seen.lengths + counts,
    )

  def logits_of(params, sums: Array, starts: Array, tokens: Array) -> Array:
    before = arrays.read_block(sums, starts, tokens.shape[1]) % vocab_size
    return params['table'][before, tokens]

  def of(tokens: Array, starts: Array) -> Array:
    one_hot = jax.nn.one_hot(tokens, vocab_size, dtype=jnp.float32)
    kept = one_hot[:, :width]
    kept = jnp.pad(kept, ((0, 0), (0, width - kept.shape[1]), (0, 0)))
    return jnp.where((starts >= 0)[:, None, None], kept, 0.0)

  def init(params, prompt, max_len: int) -> FeatureCache:
    del params
    tokens, last = prompt.decoder_tokens[:, :-1], prompt.decoder_lengths - 2
    buffer = jnp.zeros((tokens.shape[0], max_len), jnp.int32)
    seen = append(_Seen(tokens=buffer, lengths=jnp.zeros_like(last)), tokens)
    return FeatureCache(
      target=seen.replace(lengths=last + 1),
      features=of(arrays.read_block(prompt.decoder_tokens, last, 1), last),
      starts=last,
      prompt=jax.nn.one_hot(tokens, vocab_size, dtype=jnp.float32),
    )

  def extend(params, tokens, cache: FeatureCache, at=None):
    starts = cache.lengths
    seen = append(cache.target, tokens)
    sums = jnp.cumsum(seen.tokens, axis=1) - seen.tokens
    logits = logits_of(params, sums, starts, tokens)
    cache = cache.replace(
      target=seen, features=of(tokens, starts), starts=starts
    )
    return logits if at is None else arrays.read_block(logits, at, 1), cache

  def rewind(cache: FeatureCache, lengths: Array) -> FeatureCache:
    return cache.replace(target=cache.target.replace(lengths=lengths))

  def draft(params, tokens, hidden, cache: _Seen, at=None, placement=None):
    assert placement is None
    starts = cache.lengths
    cache = append(cache, arrays.argmax(hidden))
    logits = logits_of(params, jnp.cumsum(cache.tokens, 1), starts, tokens)
    can_be_drafted = jnp.arange(vocab_size) < num_drafted
    logits = jnp.where(can_be_drafted[None, None], logits, -jnp.inf)
    guesses = (tokens + tokens % 2) % vocab_size
    following = jax.nn.one_hot(guesses, vocab_size, dtype=jnp.float32)
    if at is None:
      return logits, following, cache
    one = lambda x: arrays.read_block(x, at, 1)
    return one(logits), one(following), cache

  network = EagleModel(
    init=lambda params, batch_size, max_len: _Seen(
      tokens=jnp.zeros((batch_size, max_len), jnp.int32),
      lengths=jnp.zeros(batch_size, jnp.int32),
    ),
    join=lambda params, features: features,
    extend=draft,
    rewind=lambda cache, lengths: cache.replace(lengths=lengths),
  )
  return Counting(LanguageModel(init, extend, rewind, vocab_size), network)


def late(network: EagleModel) -> Chain:
  """Broken: each token is read with the features of the one before it."""

  def join(params, features):
    shifted = jnp.pad(features[:, :-1], ((0, 0), (1, 0), (0, 0)))
    return network.join(params, shifted)

  return drafters.eagle(network._replace(join=join))


def stale(network: EagleModel) -> Chain:
  """Broken: keys that were made of guessed features stay; only the last token's
  true features are read."""
  chain = drafters.eagle(network)

  def catch_up(params, context, cache, target_cache):
    last = context.lengths - 1
    at = jnp.maximum(last - 1 - jnp.maximum(target_cache.starts, 0), 0)
    features = arrays.read_block(target_cache.features, at, 1)
    logits, hidden, cache = network.extend(
      params,
      arrays.read_block(context.tokens, last, 1),
      network.join(params, features),
      network.rewind(cache, jnp.maximum(last - 1, 0)),
      jnp.zeros_like(last),
    )
    return logits[:, 0], hidden, network.rewind(cache, last)

  return chain._replace(catch_up=catch_up)


BROKEN = {'features one position late': late, 'stale keys': stale}
