"""Language models that store residual streams along with their cache.

Stream i is the input of layer i, counted from 0, and thus the output of layer
i - 1; with n layers, stream n is the output of the last one. `LAST` is the
input of `project`, which computes logits. `networks.through` sows the streams.
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
from specdec_jax.models import kv_cache, networks
from specdec_jax.models.networks import Network
from specdec_jax.models.products import Weights

# In place of a layer's number: the states that `project` takes.
LAST = -1


def check(network: Network, chosen: Sequence[int]) -> None:
  """Raises ValueError unless the network has these streams. Stream 0, the
  embedding, is not allowed."""
  for layer in chosen:
    if layer != LAST and not 1 <= layer <= network.num_layers:
      raise ValueError(f'layer {layer} is not one of 1 to {network.num_layers}')


def last_call(
  network: Network, chosen: Sequence[int], *, width: int
) -> LanguageModel:
  """Returns a language model that stores the streams of the first `width`
  tokens of a call, and those of the prompt, in a `FeatureCache`.

  Streams of k layers are concatenated, `[B, T, k * embed]`. All tokens with a
  placement are stored, until `gather` selects `width` of them. Raises
  ValueError for a layer that does not exist.
  """

  def begin(target: Any, streams: Array, lengths: Array) -> FeatureCache:
    # Of a prompt of 4 tokens, 0 to 2 were read, and features start at 2. Of one
    # token, none was read: features start at -1 and are zeros.
    last = lengths - 1
    if not streams.shape[1]:
      streams = jnp.pad(streams, ((0, 0), (0, 1), (0, 0)))
    block = arrays.read_block(streams, last, width)
    has_any = (last >= 0)[:, None, None]
    return FeatureCache(
      target=target,
      features=jnp.where(has_any, block, jnp.zeros_like(block)),
      starts=last.astype(jnp.int32),
      prompt=streams,
    )

  def keep(
    cache: FeatureCache, streams: Array, placement: Placement | None
  ) -> FeatureCache:
    # A call may be wider, as for a prompt, or narrower, if no row drafts.
    if placement is None:
      streams = streams[:, :width]
      missing = width - streams.shape[1]
      streams = jnp.pad(streams, ((0, 0), (0, missing), (0, 0)))
    return dataclasses.replace(cache, features=streams, starts=cache.lengths)

  def move(
    cache: FeatureCache, starts: Array, offsets: Array, span: int
  ) -> FeatureCache:
    del span
    return features.gather(cache, starts, offsets, width=width)

  return _tapped(network, chosen, begin, keep, move)


@base.value
class StreamsCache:
  """A network's cache, and the streams of all positions in it.

  Attributes:
    target: the network's own cache.
    streams: uint16 `[B, 1, S, k * embed]`, bits of bfloat16 in the layout of a
      cache: CPUs write bits faster, see `kv_cache`.
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
  """Returns a language model that stores the streams of every position, in a
  `StreamsCache`. Raises ValueError for a layer that does not exist."""

  def begin(target: Any, streams: Array, lengths: Array) -> StreamsCache:
    # The prefill is written as a first call, from entry 0 on.
    batch_size, num_tokens, width = streams.shape
    shape = batch_size, 1, target.capacity, width
    cache = StreamsCache(
      target=kv_cache.rewind(target, jnp.zeros_like(lengths)),
      streams=jnp.zeros(shape, jnp.uint16),
    )
    return keep(cache, streams, None) if num_tokens else cache

  def keep(
    cache: StreamsCache, streams: Array, placement: Placement | None
  ) -> StreamsCache:
    del placement
    # `keep` runs before the cache is replaced: lengths are those before the
    # call, where it writes.
    bits = jax.lax.bitcast_convert_type(
      streams.astype(jnp.bfloat16), jnp.uint16
    )
    written = kv_cache.append(cache.streams, bits[:, None], cache.lengths)
    return dataclasses.replace(cache, streams=written)

  def move(
    cache: StreamsCache, starts: Array, offsets: Array, span: int
  ) -> StreamsCache:
    moved = kv_cache.gather(cache.streams, starts, offsets, span)
    return dataclasses.replace(cache, streams=moved)

  return _tapped(network, chosen, begin, keep, move)


def _tapped(
  network: Network,
  chosen: Sequence[int],
  begin: Callable[[Any, Array, Array], Any],
  keep: Callable[[Any, Array, Placement | None], Any],
  move: Callable[[Any, Array, Array, int], Any],
) -> LanguageModel:
  """Returns a language model whose cache has the network's as `target`.

  `begin` makes that cache from the network's after the prefill, the prompt's
  streams and its lengths; `keep` stores the streams of a call, before the
  network's cache is replaced; `move` gathers stored streams.
  """
  run = _with_streams(network, chosen)

  def init(params: Weights, prompt: Prompt, max_len: int) -> Any:
    target, tokens = network.before_prompt(params, prompt, max_len)
    shape = *tokens.shape, len(chosen) * network.config.embed_dim
    streams = jnp.zeros(shape, network.config.dtype)
    # The last token of a prompt is fed later: of a prompt of one, none is fed.
    if tokens.shape[1]:
      _, target, streams = run(params, tokens, target)
    lengths = prompt.decoder_lengths - 1
    return rewind(begin(target, streams, lengths), lengths)

  def extend(
    params: Weights,
    tokens: Array,
    cache: Any,
    at: Array | None = None,
    placement: Placement | None = None,
  ) -> tuple[Array, Any]:
    x, target, streams = run(params, tokens, cache.target, placement)
    cache = dataclasses.replace(keep(cache, streams, placement), target=target)
    return network.project(params, x, at), cache

  def rewind(cache: Any, lengths: Array) -> Any:
    target = kv_cache.rewind(cache.target, lengths)
    return dataclasses.replace(cache, target=target)

  def gather(cache: Any, starts: Array, offsets: Array, span: int) -> Any:
    target = kv_cache.gather_all(cache.target, starts, offsets, span)
    moved = move(cache, starts, offsets, span)
    return dataclasses.replace(moved, target=target)

  return LanguageModel(init, extend, rewind, network.config.vocab_size, gather)


def _with_streams(
  network: Network, chosen: Sequence[int]
) -> Callable[..., tuple[Array, Any, Array]]:
  """Returns the network's `extend` with streams: `(params, tokens, cache,
  placement=None) -> (x, cache, streams[B, T, k * embed])`, where `x` is the
  input of `project`."""
  check(network, chosen)

  def run(params: Weights, *args: Any) -> tuple[Array, Any, Array]:
    # With `mutable`, Flax also returns what the layers sowed.
    (x, cache), sown = network.module.apply(
      {'params': params}, *args, method='extend', mutable=networks.TAPS
    )
    # A path such as ('decoder', 'stream_3', 0): the name is the last but one.
    by_name: dict[str, Array] = {
      path[-2].key: stream for path, stream in jax.tree.leaves_with_path(sown)
    }
    names = {i: networks.TAP.format(i) for i in chosen}
    streams = [x if i == LAST else by_name[names[i]] for i in chosen]
    return x, cache, jnp.concatenate(streams, axis=-1)

  return run
