"""Networks as the functions that decoding calls."""

import dataclasses
import functools
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple, TypeVar, cast

import flax.linen as nn
import jax.numpy as jnp

from specdec_jax import arrays
from specdec_jax.base import Array, LanguageModel, Placement, Prompt
from specdec_jax.models import kv_cache
from specdec_jax.models.kv_cache import KVCache
from specdec_jax.models.layers import Weights, applied

# Where networks offer their residual streams, and by which names.
TAPS, TAP = 'intermediates', 'stream_{}'
# Keys and values `[B, H, S, D]` of a layer, and how many of each row count.
Past = tuple[Array, Array, Array]
# From a stream and what a layer has kept, None if all tokens are new, to the
# stream that leaves it, and the keys and values that it attended to.
LayerFn = Callable[[Array, Past | None], tuple[Array, Array, Array]]


Layer = TypeVar('Layer', bound=nn.Module)


def traced_once(module: nn.Module, layer: type[Layer]) -> type[Layer]:
  """Returns the class of the layers in a stack of `module`, which are alike:
  all of them are traced and lowered as one."""
  # `nn.jit` splits random keys in its own way: parameters and dropout of a seed
  # would be others.
  is_random = module.has_rng('params') or module.has_rng('dropout')
  made: type[Layer] = layer if is_random else _jitted(cast(Any, layer))
  return made


@functools.cache
def _jitted(layer: Any) -> Any:
  return nn.jit(layer)


# A cache to append to, if there is one.
Kept = TypeVar('Kept', KVCache, KVCache | None)


def through(
  module: nn.Module, stack: Iterable[LayerFn], x: Array, past: Kept
) -> tuple[Array, Kept]:
  """Puts a stream `[B, T, embed]` through a stack of layers: what leaves the
  last one, and the cache with T more positions. `models.taps` may keep the
  streams between them; that costs nothing where nobody asks."""
  keys, values = [], []
  module.sow(TAPS, TAP.format(0), x)
  for i, layer in enumerate(stack):
    kept = None
    if past is not None:
      kept = past.keys[i], past.values[i], past.lengths
    x, layer_keys, layer_values = layer(x, kept)
    keys.append(layer_keys)
    values.append(layer_values)
    # Stream i enters layer i: two layers have streams 0, 1 and 2.
    module.sow(TAPS, TAP.format(i + 1), x)
  if past is None:
    return x, past
  lengths = past.lengths + x.shape[1]
  return x, dataclasses.replace(
    past, keys=tuple(keys), values=tuple(values), lengths=lengths
  )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Network:
  """A network of decoder layers, with what decoding needs to know of it.

  Attributes:
    module: a network with three methods: `empty_cache(batch_size, capacity)`,
      to a `KVCache`, with a third argument, int32 `[B, E]`, if it has an
      encoder; `extend(tokens, cache, placement)`, to the last hidden states
      `[B, T, embed]` and the cache; and `project`, from such states to logits.
      If `extend` goes `through` its layers, `models.taps` can keep its streams.
    config: its sizes, of which `vocab_size`, `embed_dim` and `dtype` are read.
    num_layers: of the decoder.
    has_encoder: whether prompts need encoder tokens; else they may have none.
    embedder: where the decoder's token embeddings lie among the parameters.
  """

  module: nn.Module
  config: Any
  num_layers: int
  has_encoder: bool = False
  embedder: tuple[str, ...] = ('token_embedder',)

  def token_embedder(self, params: Weights) -> Weights:
    """The parameters of the decoder's token embeddings."""
    # ('decoder', 'token_embedder') is a branch within a branch.
    for name in self.embedder:
      params = params[name]
    return params

  def before_prompt(
    self, params: Weights, prompt: Prompt, max_len: int
  ) -> tuple[Any, Array]:
    """An empty cache with room for `max_len` positions, after the encoder, and
    the tokens to prefill: all but each prompt's last. ValueError if the prompt
    is for another kind of network."""
    if (prompt.encoder_tokens is None) == self.has_encoder:
      needs = 'has no encoder and takes no encoder tokens: give none'
      if self.has_encoder:
        needs = 'needs encoder tokens: give them in the prompt'
      raise ValueError(f'the model {needs}')
    batch_size, prompt_len = prompt.decoder_tokens.shape
    # An encoder is run once, where the cache is made.
    inputs = (prompt.encoder_tokens,) if self.has_encoder else ()
    sizes = batch_size, max(max_len, prompt_len)
    cache = applied(self.module)(params, *sizes, *inputs, method='empty_cache')
    return cache, prompt.decoder_tokens[:, :-1]

  def project(
    self, params: Weights, x: Array, at: Array | None = None
  ) -> Array:
    """Logits of hidden states `[B, T, embed]`, or of those at `at[B]`."""
    if at is not None:
      x = arrays.read_block(x, at, 1)
    logits: Array = applied(self.module)(params, x, method='project')
    return logits


def tapped(network: Network | None) -> Network:
  """A target's network, whose streams a drafter reads; ValueError for None, of
  a family without one."""
  if network is None:
    raise ValueError(
      'the target keeps no streams that a drafter could read: choose another '
      'drafter, or a target with a network'
    )
  return network


class Bound(NamedTuple):
  """A network that only drafts, bound to the target that it drafts for.

  Attributes:
    model: what its drafter takes, such as `drafters.eagle.EagleModel`.
    target: the target's functions, where the network reads more of it than
      tokens; None for the usual ones.
    join: from the target's params and its own to the drafter's params.
  """

  model: Any
  target: LanguageModel | None = None
  join: Callable[[Any, Any], Any] = lambda target, own: own


def init_params(network: Network, rng_key: Array) -> Weights:
  """Fresh float32 parameters: all that a step of decoding reads."""
  # Their shapes depend on no number of tokens.
  token = jnp.zeros((1, 1), jnp.int32)
  inputs = (token,) if network.has_encoder else ()

  def step(module: Any) -> Array:
    # Flax makes a parameter where it is first used.
    x, _ = module.extend(token, module.empty_cache(1, 1, *inputs))
    logits: Array = module.project(x)
    return logits

  params: Weights = network.module.init(rng_key, method=step)['params']
  return params


def language_model(network: Network) -> LanguageModel:
  """The functions that decoding calls."""
  apply = applied(network.module)

  def init(params: Weights, prompt: Prompt, max_len: int) -> Any:
    # Of the prompt's logits none are needed, so that nothing is projected.
    cache, tokens = network.before_prompt(params, prompt, max_len)
    if tokens.shape[1]:
      _, cache = apply(params, tokens, cache, method='extend')
    return kv_cache.rewind(cache, prompt.decoder_lengths - 1)

  def extend(
    params: Weights,
    tokens: Array,
    cache: Any,
    at: Array | None = None,
    placement: Placement | None = None,
  ) -> tuple[Array, Any]:
    x, cache = apply(params, tokens, cache, placement, method='extend')
    return network.project(params, x, at), cache

  vocab_size = network.config.vocab_size
  return LanguageModel(
    init, extend, kv_cache.rewind, vocab_size, kv_cache.gather_all
  )
