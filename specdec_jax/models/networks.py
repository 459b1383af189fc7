"""The functions that decoding calls, `base.LanguageModel`, of networks."""

import contextlib
import contextvars
import dataclasses
import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple, TypeVar

import flax.linen as nn
import jax.numpy as jnp

from specdec_jax import arrays
from specdec_jax.base import Array, LanguageModel, Placement, Prompt
from specdec_jax.models import kv_cache
from specdec_jax.models.kv_cache import Entries, KVCache
from specdec_jax.models.layers import applied
from specdec_jax.models.products import Weights

# The collection and the names under which networks sow residual streams.
TAPS, TAP = 'intermediates', 'stream_{}'
# A layer's cached keys and values `[B, H, S, D]`, and lengths int32 `[B]`.
Past = tuple[Entries, Entries, Array]
# `(stream, past) -> (stream, keys, values)`: applies a layer; the keys and
# values are those attended to. `past` is None if all tokens are new.
LayerFn = Callable[[Array, Past | None], tuple[Array, Entries, Entries]]

Layer = TypeVar('Layer', bound=nn.Module)
# A cache to append to, if there is one.
MaybeCache = TypeVar('MaybeCache', KVCache, KVCache | None)
# One class for all stacks of a layer.
_jitted: Any = functools.cache(nn.jit)


# Whether parameters are initialised for their shapes alone.
_only_shapes = contextvars.ContextVar('only_shapes', default=False)


@contextlib.contextmanager
def only_shapes() -> Iterator[None]:
  """Within it, initialisation draws other values, and traces equal layers
  once."""
  token = _only_shapes.set(True)
  try:
    yield
  finally:
    _only_shapes.reset(token)


def traced_once(module: nn.Module, layer: type[Layer]) -> type[Layer]:
  """Returns the class for the equal layers in a stack of `module`, wrapped so
  that they are traced and lowered once."""
  # Not where random keys are used: `nn.jit` splits them in its own way, which
  # would change the parameters and the dropout of a seed.
  is_drawn = module.has_rng('params') and not _only_shapes.get()
  is_random = is_drawn or module.has_rng('dropout')
  return layer if is_random else _jitted(layer)


def through(
  module: nn.Module,
  stack: Iterable[LayerFn],
  x: Array,
  past: MaybeCache,
  sources: Sequence[int] | None = None,
) -> tuple[Array, MaybeCache]:
  """Applies a stack of layers to a residual stream `[B, T, embed]`.

  `sources` has for every layer the number of the layer whose keys and values it
  reads: its own, or that of an earlier one. The layers with keys of their own
  come first, and only they have entries in the cache.

  Returns the output of the last layer, and the cache with T more positions.
  `models.taps` can collect the streams between layers; to sow them costs
  nothing unless it does.
  """
  keys: list[Entries] = []
  values: list[Entries] = []
  module.sow(TAPS, TAP.format(0), x)
  for i, layer in enumerate(stack):
    source = i if sources is None else sources[i]
    if source < len(keys):
      # The source has already appended this call's tokens.
      lengths = jnp.zeros(x.shape[0], jnp.int32)
      if past is not None:
        lengths = past.lengths
      x, _, _ = layer(x, (keys[source], values[source], lengths))
    else:
      layer_past = None
      if past is not None:
        layer_past = past.keys[i], past.values[i], past.lengths
      x, layer_keys, layer_values = layer(x, layer_past)
      keys.append(layer_keys)
      values.append(layer_values)
    # Stream i enters layer i; two layers have the streams 0, 1 and 2.
    module.sow(TAPS, TAP.format(i + 1), x)
  if past is None:
    return x, past
  lengths = past.lengths + x.shape[1]
  return x, dataclasses.replace(
    past, keys=tuple(keys), values=tuple(values), lengths=lengths
  )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Network:
  """A network of decoder layers, as decoding uses it.

  Attributes:
    module: a network with two methods: `extend(tokens, cache, placement)`
      returns the last hidden states `[B, T, embed]` and the `KVCache`;
      `project` maps such states to logits. With an encoder, `cross_cache` maps
      its tokens to a `CrossCache`. If `extend` uses `through`, `models.taps`
      can keep its streams.
    config: its sizes; `vocab_size`, `embed_dim`, `dtype` and what
      `kv_cache.init` reads.
    num_layers: layers of the decoder.
    has_encoder: whether prompts must have encoder tokens; else they must not.
  """

  module: nn.Module
  config: Any
  num_layers: int
  has_encoder: bool

  def token_embedder(self, params: Weights) -> Weights:
    """Returns the parameters of the decoder's token embeddings."""
    # At the top of the tree, or in `decoder` if the encoder does not share
    # them: in a T5Gemma, and in a T5 without an encoder.
    shared = params.get('token_embedder')
    return shared or params['decoder']['token_embedder']

  def before_prompt(
    self, params: Weights, prompt: Prompt, max_len: int
  ) -> tuple[Any, Array]:
    """Runs the encoder, if any, and makes an empty cache.

    Returns the cache, with room for `max_len` positions, and the tokens to
    prefill, int32 `[B, P-1]`: the prompt buffer without its last column. Raises
    ValueError if encoder tokens are missing or not expected.
    """
    if (prompt.encoder_tokens is None) == self.has_encoder:
      if self.has_encoder:
        raise ValueError(
          'the model needs encoder tokens: add them to the prompt'
        )
      raise ValueError('the model has no encoder: remove the encoder tokens')
    batch_size, prompt_len = prompt.decoder_tokens.shape
    capacity = max(max_len, prompt_len)
    cache = kv_cache.init(self.config, batch_size, capacity, self.num_layers)
    source = prompt.encoder_tokens
    if source is not None:
      cross = applied(self.module)(params, source, method='cross_cache')
      cache = dataclasses.replace(cache, encoder=cross)
    return cache, prompt.decoder_tokens[:, :-1]

  def project(
    self, params: Weights, x: Array, at: Array | None = None
  ) -> Array:
    """Computes logits of hidden states `[B, T, embed]`, or only of those at
    `at[B]`."""
    if at is not None:
      x = arrays.read_block(x, at, 1)
    logits: Array = applied(self.module)(params, x, method='project')
    return logits


class Bound(NamedTuple):
  """A network that only drafts, bound to its target.

  Attributes:
    model: the model for its drafter, such as `drafters.eagle.EagleModel`.
    target: the target's functions, if the network reads more of the target than
      its tokens; None for the usual ones.
    join: `(target_params, network_params) -> params` of the drafter.
  """

  model: Any
  target: LanguageModel | None = None
  join: Callable[[Any, Any], Any] = lambda target, network: network


def init_params(network: Network, rng_key: Array) -> Weights:
  """Initialises float32 parameters: all that a step of decoding reads."""
  # One token is enough: no parameter's shape depends on their number.
  token = jnp.zeros((1, 1), jnp.int32)

  def step(module: Any) -> Array:
    # Flax makes a parameter where it is first used.
    cache = kv_cache.init(network.config, 1, 1, network.num_layers)
    if network.has_encoder:
      cache = dataclasses.replace(cache, encoder=module.cross_cache(token))
    x, _ = module.extend(token, cache)
    logits: Array = module.project(x)
    return logits

  params: Weights = network.module.init(rng_key, method=step)['params']
  return params


def language_model(network: Network) -> LanguageModel:
  """Returns the functions that decoding calls."""
  apply = applied(network.module)

  def init(params: Weights, prompt: Prompt, max_len: int) -> Any:
    # No logits of the prompt are needed, so nothing is projected.
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
