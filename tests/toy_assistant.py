"""Assistants in miniature for the toy Gemma 4s, and the ways in which they can
be wrong."""

import dataclasses

from specdec_jax import drafters
from specdec_jax.drafters.assistant import AssistantModel
from specdec_jax.drafters.autoregressive import Chain
from specdec_jax.models.drafting.assistant import AssistantConfig
from specdec_jax.models.gemma.gemma4 import Gemma4Config
from tests import toy_gemma


def config(target: Gemma4Config, **sizes) -> AssistantConfig:
  """Sizes for a target: a layer of each type, narrower than the target's."""
  shared = (
    *('vocab_size', 'num_heads', 'num_kv_heads', 'head_dim'),
    *('full_num_kv_heads', 'full_head_dim', 'windows', 'dtype'),
  )
  defaults = {name: getattr(target, name) for name in shared} | {
    'target_embed_dim': target.embed_dim,
    'embed_dim': 6,
    'num_layers': 2,
    'mlp_dim': 8,
  }
  return AssistantConfig(**(defaults | sizes))


def clustered(target: Gemma4Config) -> AssistantConfig:
  """One that drafts half of the tokens at a time, of two or more each."""
  return config(target, num_clusters=2, num_chosen_clusters=1)


def joined(target_params, own):
  """The drafter's params in the loop."""
  embedder = target_params['token_embedder']
  return {'assistant': own, 'token_embedder': embedder}


def params(sizes: AssistantConfig, *, seed: int):
  return toy_gemma.params(sizes, seed=seed)


def advanced(model: AssistantModel) -> Chain:
  """Broken: each draft has a position of its own."""
  chain = drafters.assistant(model)

  def extend(params, tokens, hidden, state, target_cache, placement=None):
    state = dataclasses.replace(state, lengths=state.lengths + 1)
    return chain.extend(params, tokens, hidden, state, target_cache, placement)

  return chain._replace(extend=extend)


def late(model: AssistantModel) -> Chain:
  """Broken: the hidden state is that of the token before the right one."""
  chain = drafters.assistant(model)

  def catch_up(params, context, state, target_cache):
    early = dataclasses.replace(target_cache, starts=target_cache.starts + 1)
    return chain.catch_up(params, context, state, early)

  return chain._replace(catch_up=catch_up)


def unseeing(model: AssistantModel) -> Chain:
  """Broken: it has a cache of its own, without the target's keys."""

  def step(params, tokens, hidden, cache, lengths):
    keys = tuple(0 * layer for layer in cache.keys)
    own = dataclasses.replace(cache, keys=keys)
    return model.step(params, tokens, hidden, own, lengths)

  return drafters.assistant(AssistantModel(step))


BROKEN = {
  'a position for each draft': advanced,
  'hidden states one position late': late,
  'a cache of its own': unseeing,
}
