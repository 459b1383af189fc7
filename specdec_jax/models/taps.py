"""Language models that keep residual streams beside their cache.

A stream is what enters a layer, counted from 0, so that stream i is what layer
i - 1 gave; that of the number of layers is what leaves the last one, and `LAST`
what the logits are made of. Networks offer them by `layers.tap`, which costs
nothing where nobody asks.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from specdec_jax import arrays, base
from specdec_jax.base import Array, LanguageModel, Placement, Prompt
from specdec_jax.drafters import features
from specdec_jax.drafters.features import FeatureCache
from specdec_jax.models import kv_cache, layers
from specdec_jax.models.networks import Network

# In place of a layer: the states that `project` takes.
LAST = -1


def check(network: Network, chosen: Sequence[int]) -> None:
  """Raises ValueError unless the network has these streams; that of layer 0,
  the embedding, is none."""
  for layer in chosen:
    if layer != LAST and not 1 <= layer <= network.num_layers:
      raise ValueError(
        f'layer {layer} is not one of 1 to {network.num_layers}, whose '
        'residual streams can be kept'
      )


def last_call(
  network: Network, chosen: Sequence[int], *, width: int
) -> LanguageModel:
  """The language model, whose cache is a `FeatureCache`: it keeps the streams
  of the first `width` tokens of a call, and those of the prompt.

  Streams of several layers are beside each other, `[B, T, k * embed]`. Those of
  tokens with a placement are all kept, until `gather` leaves `width` of them.
  Raises ValueError for a layer that is not there.
  """
  run = _with_streams(network, chosen)

  def init(params: Any, prompt: Prompt, max_len: int) -> FeatureCache:
    cache, tokens = network.before_prompt(params, prompt, max_len)
    if tokens.shape[1]:
      _, cache, streams = run(params, tokens, cache)
    else:
      streams = _empty(network, chosen, len(tokens), 1)
    last = prompt.decoder_lengths - 2
    kept = arrays.read_block(streams, last, width)
    has_any = (last >= 0)[:, None, None]
    return FeatureCache(
      target=network.rewind(cache, last + 1),
      features=jnp.where(has_any, kept, jnp.zeros_like(kept)),
      starts=last.astype(jnp.int32),
      prompt=streams,
    )

  def extend(
    params: Any,
    tokens: Array,
    cache: FeatureCache,
    at: Array | None = None,
    placement: Placement | None = None,
  ) -> tuple[Array, FeatureCache]:
    x, target, streams = run(params, tokens, cache.target, placement)
    if placement is None:
      streams = streams[:, :width]
      missing = width - streams.shape[1]
      streams = jnp.pad(streams, ((0, 0), (0, missing), (0, 0)))
    return network.project(params, x, at), dataclasses.replace(
      cache, target=target, features=streams, starts=cache.lengths
    )

  def rewind(cache: FeatureCache, lengths: Array) -> FeatureCache:
    target = network.rewind(cache.target, lengths)
    return dataclasses.replace(cache, target=target)

  def gather(
    cache: FeatureCache, starts: Array, offsets: Array, span: int
  ) -> FeatureCache:
    cache = features.gather(cache, starts, offsets, width=width)
    target = network.gather(cache.target, starts, offsets, span)
    return dataclasses.replace(cache, target=target)

  return LanguageModel(init, extend, rewind, network.config.vocab_size, gather)


@base.value
class StreamsCache:
  """A network's cache, and the streams of all that it holds.

  Attributes:
    target: the network's own.
    streams: uint16 `[B, 1, S, k * embed]`, the bits of bfloat16, in the layout
      of a cache. CPUs write bits faster, see `kv_cache`.
  """

  target: Any
  streams: Array

  @property
  def lengths(self) -> Array:
    lengths: Array = self.target.lengths
    return lengths

  @property
  def capacity(self) -> int:
    return self.streams.shape[2]


def all_positions(network: Network, chosen: Sequence[int]) -> LanguageModel:
  """The language model with a `StreamsCache`: it keeps the streams of every
  position. Raises ValueError for a layer that is not there."""
  run = _with_streams(network, chosen)

  def append(cache: StreamsCache, target: Any, streams: Array) -> StreamsCache:
    bits = jax.lax.bitcast_convert_type(
      streams.astype(jnp.bfloat16), jnp.uint16
    )
    return StreamsCache(
      target=target,
      streams=kv_cache.append(cache.streams, bits[:, None], cache.lengths),
    )

  def init(params: Any, prompt: Prompt, max_len: int) -> StreamsCache:
    target, tokens = network.before_prompt(params, prompt, max_len)
    empty = _empty(network, chosen, len(tokens), target.capacity)
    cache = StreamsCache(
      target=target, streams=empty[:, None].astype(jnp.uint16)
    )
    if tokens.shape[1]:
      _, target, streams = run(params, tokens, target)
      cache = append(cache, target, streams)
    return rewind(cache, prompt.decoder_lengths - 1)

  def extend(
    params: Any,
    tokens: Array,
    cache: StreamsCache,
    at: Array | None = None,
    placement: Placement | None = None,
  ) -> tuple[Array, StreamsCache]:
    x, target, streams = run(params, tokens, cache.target, placement)
    return network.project(params, x, at), append(cache, target, streams)

  def rewind(cache: StreamsCache, lengths: Array) -> StreamsCache:
    target = network.rewind(cache.target, lengths)
    return dataclasses.replace(cache, target=target)

  def gather(
    cache: StreamsCache, starts: Array, offsets: Array, span: int
  ) -> StreamsCache:
    return StreamsCache(
      target=network.gather(cache.target, starts, offsets, span),
      streams=kv_cache.gather(cache.streams, starts, offsets, span),
    )

  return LanguageModel(init, extend, rewind, network.config.vocab_size, gather)


def _with_streams(
  network: Network, chosen: Sequence[int]
) -> Callable[..., tuple[Array, Any, Array]]:
  """The network's `extend` as `(params, tokens, cache, placement=None) -> (x,
  cache, streams[B, T, k * embed])`, where `x` is what `project` takes."""
  check(network, chosen)

  def run(params: Any, *args: Any) -> tuple[Array, Any, Array]:
    (x, cache), sown = network.module.apply(
      {'params': params}, *args, method='extend', mutable=layers.TAPS
    )
    # Of a stack within the network, names are `decoder`, `stream_3`, 0.
    by_name: dict[str, Array] = {
      path[-2].key: stream
      for path, stream in jax.tree.leaves_with_path(sown[layers.TAPS])
    }
    streams = [
      x if i == LAST else by_name[layers.TAP.format(i)] for i in chosen
    ]
    return x, cache, jnp.concatenate(streams, axis=-1)

  return run


def _empty(
  network: Network, chosen: Sequence[int], batch_size: int, num_tokens: int
) -> Array:
  config = network.config
  shape = batch_size, num_tokens, len(chosen) * config.embed_dim
  return jnp.zeros(shape, config.dtype)
