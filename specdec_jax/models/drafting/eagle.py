"""The network of an EAGLE-3 drafter (Li et al., arXiv 2503.01840).

One decoder layer that drafts from the target's own computation. `join` maps
several of the target's residual streams at a position to a hidden state. The
layer combines it with the embedding of the token at the *next* position. Its
output is projected to the logits of the token after that, and serves as the
hidden state of the next drafted position, for which the target has none yet.
"""

import dataclasses
import functools
import itertools

import flax.linen as nn
import jax.numpy as jnp

from specdec_jax import arrays
from specdec_jax.base import Array, Placement
from specdec_jax.drafters.eagle import EagleModel
from specdec_jax.models import attention, kv_cache, quantized, taps
from specdec_jax.models.drafting.draft_vocabulary import (
  check_target_ids,
  spread,
)
from specdec_jax.models.kv_cache import KVCache
from specdec_jax.models.layers import (
  Dense,
  Embed,
  Mlp,
  RMSNorm,
  Weights,
  applied,
  parameter,
)
from specdec_jax.models.llama import (
  LlamaConfig,
  MixFn,
  RopeScaling,
  SelfAttention,
)
from specdec_jax.models.networks import Bound, Network

_NUM_DEFAULT_FEATURES = 3
# A limit for sizes in files, as each has a norm; no known drafter has as many.
_MAX_FEATURES = 16


@dataclasses.dataclass(frozen=True, kw_only=True)
class EagleConfig:
  """Sizes of an EAGLE-3 network, and where its norms are. `LlamaConfig` has the
  other attributes.

  Attributes:
    vocab_size: the target's.
    draft_vocab_size: number of tokens that can be drafted.
    embed_dim: width of the hidden state and of the token embeddings.
    target_embed_dim: width of the target's residual stream.
    feature_layers: the target's layers whose *input* is read, counted from 0,
      ascending; with n layers, n stands for the output of the last. Empty means
      2, n // 2 and n - 3.
    norm_before_residual: whether the layer's residual is the normed hidden
      state instead of the hidden state itself.
    norm_before_fc: whether all features have one norm before they are joined.
    fc_norm: whether each feature has its own norm; excludes `norm_before_fc`.
    norm_before_logits: whether the last norm precedes the projection.
    norm_before_next: whether the next drafted position gets the normed state.
    has_embedding: whether it has token embeddings instead of the target's.
  """

  vocab_size: int
  draft_vocab_size: int
  embed_dim: int
  target_embed_dim: int
  num_heads: int
  num_kv_heads: int
  head_dim: int
  mlp_dim: int
  feature_layers: tuple[int, ...] = ()
  rope_base: float = 10_000.0
  rope_scaling: RopeScaling | None = None
  norm_epsilon: float = 1e-5
  max_positions: int = 2048
  has_qk_norm: bool = False
  norm_before_residual: bool = False
  norm_before_fc: bool = False
  fc_norm: bool = False
  norm_before_logits: bool = True
  norm_before_next: bool = False
  has_embedding: bool = False
  dtype: jnp.dtype = jnp.float32

  def __post_init__(self):
    if not 1 <= self.draft_vocab_size <= self.vocab_size:
      raise ValueError(
        f'draft_vocab_size {self.draft_vocab_size} should be 1 to vocab_size '
        f'{self.vocab_size}'
      )
    # Two trainers norm the same features in these two ways.
    if self.norm_before_fc and self.fc_norm:
      raise ValueError('norm_before_fc and fc_norm exclude each other: set one')
    if self.norm_before_next and not self.norm_before_logits:
      raise ValueError('norm_before_next needs norm_before_logits: set both')
    layers = self.feature_layers
    if len(layers) > _MAX_FEATURES or min(layers, default=1) < 1:
      raise ValueError(
        f'feature layers are up to {_MAX_FEATURES} and not the first, whose '
        f'input is the embedding, got {_listed(layers)}'
      )
    _check_ascending(layers)
    # Raises ValueError for sizes that no Llama has.
    self.layer()

  @property
  def num_features(self) -> int:
    """The number of residual streams that `join` reads."""
    return len(self.feature_layers) or _NUM_DEFAULT_FEATURES

  def layer(self) -> LlamaConfig:
    """Makes the sizes of the layer as those of a Llama with one layer."""
    names = {field.name for field in dataclasses.fields(LlamaConfig)}
    shared = {key: x for key, x in vars(self).items() if key in names}
    return LlamaConfig(num_layers=1, **shared)


def _check_ascending(layers: tuple[int, ...]) -> None:
  if any(a >= b for a, b in itertools.pairwise(layers)):
    raise ValueError(f'feature layers must ascend, got {_listed(layers)}')


def _listed(layers: tuple[int, ...]) -> str:
  return ', '.join(map(str, layers[: _MAX_FEATURES + 1]))


def feature_layers(config: EagleConfig, num_layers: int) -> tuple[int, ...]:
  """Lists the layers, in a target of `num_layers`, whose inputs are features;
  raises ValueError if it has too few for the default ones."""
  # Of a target of 30 layers: 2, 15 and 27, early, middle and late.
  layers = config.feature_layers or (2, num_layers // 2, num_layers - 3)
  _check_ascending(layers)
  return layers


class Eagle(nn.Module):
  """The network; `init_params` makes its parameters.

  They include `target_ids`, int32 `[V_draft]`: the target's id of each token
  that can be drafted.
  """

  config: EagleConfig

  def setup(self):
    config = self.config
    norm = functools.partial(RMSNorm, config.norm_epsilon, config.dtype)
    if config.has_embedding:
      self.token_embedder = Embed(
        config.vocab_size, config.embed_dim, config.dtype
      )
    if config.norm_before_fc:
      self.features_norm = norm()
    if config.fc_norm:
      self.feature_norms = [norm() for _ in range(config.num_features)]
    self.features_dense = Dense(config.embed_dim, config.dtype)
    self.embedding_layer_norm = norm()
    self.hidden_layer_norm = norm()
    self.self_attention = SelfAttention(config.layer())
    self.pre_mlp_layer_norm = norm()
    self.mlp = Mlp(config.mlp_dim, ('silu', 'linear'), config.dtype)
    if config.norm_before_logits:
      self.decoder_norm = norm()
    self.logits_dense = Dense(config.draft_vocab_size)
    first_ids = lambda key, shape: jnp.arange(shape[0], dtype=jnp.int32)
    self.target_ids = parameter(
      self, 'target_ids', first_ids, (config.draft_vocab_size,)
    )

  def embed(self, tokens: Array) -> Array:
    """Looks up int32 `[B, T]` in the network's own embeddings, if it has them:
    `[B, T, embed]`."""
    return self.token_embedder(tokens)

  def join(self, features: Array) -> Array:
    """Maps the target's streams `[B, T, k * target_embed]`, lower layers first,
    to hidden states `[B, T, embed]`."""
    config = self.config
    if config.norm_before_fc:
      features = self.features_norm(features)
    # The last axis holds k features, each as wide as the target's stream.
    if config.fc_norm:
      parts = jnp.split(features, config.num_features, axis=-1)
      normed = [
        norm(part) for norm, part in zip(self.feature_norms, parts, strict=True)
      ]
      features = jnp.concatenate(normed, axis=-1)
    return self.features_dense(features)

  def __call__(
    self,
    embeddings: Array,
    hidden: Array,
    keys: Array,
    values: Array,
    lengths: Array,
    mix: MixFn | None = None,
    placement: Placement | None = None,
  ) -> tuple[Array, Array, Array]:
    """Appends T positions to the cache and attends to all of it.

    Args:
      embeddings: `[B, T, embed]`, of the token *after* each position.
      hidden: `[B, T, embed]`, of each position: from `join`, or what this
        function returned for the position before.
      keys: `[B, KV, S, D]`, the cache.
      values: `[B, KV, S, D]`, likewise.
      lengths: int32 `[B]`, how many entries of each row count.
      mix: another attention, for training; see `SelfAttention`.
      placement: positions and mask of tokens that do not continue the text, as
        those of a tree.

    Returns:
      The hidden states of the following T positions, `[B, T, embed]`, which
      `project` takes; keys; values.
    """
    # The layer's input is twice as wide: [embedding after, hidden state].
    config = self.config
    # Trainers differ in whether the residual starts before or after the norm.
    normed = self.hidden_layer_norm(hidden)
    x = normed if config.norm_before_residual else hidden
    both = jnp.concatenate([self.embedding_layer_norm(embeddings), normed], -1)
    placement = attention.placed(
      lengths, hidden.shape[1], keys.shape[2], placement
    )
    h, keys, values = self.self_attention(
      both, keys, values, lengths, placement, mix
    )
    # From here on as in a Llama's layer.
    x = x + h
    x = x + self.mlp(self.pre_mlp_layer_norm(x))
    if config.norm_before_next:
      x = self.decoder_norm(x)
    return x, keys, values

  def project(self, hidden: Array) -> Array:
    """Projects the layer's hidden states `[B, T, embed]` to float32 logits `[B,
    T, V_draft]`, of the tokens `target_ids`."""
    config = self.config
    if config.norm_before_logits and not config.norm_before_next:
      hidden = self.decoder_norm(hidden)
    return self.logits_dense(hidden)


def init_params(config: EagleConfig, rng_key: Array) -> Weights:
  """Initialises float32 parameters; `target_ids` are the first token ids."""

  def use_all(network: Eagle) -> Array:
    # Flax makes a parameter where it is first used, so all methods are called.
    features = jnp.zeros((1, 1, config.num_features * config.target_embed_dim))
    hidden = network.join(features)
    embeddings = jnp.zeros((1, 1, config.embed_dim))
    if config.has_embedding:
      embeddings = network.embed(jnp.zeros((1, 1), jnp.int32))
    cache = jnp.zeros((1, config.num_kv_heads, 1, config.head_dim))
    lengths = jnp.zeros(1, jnp.int32)
    hidden, *_ = network(embeddings, hidden, cache, cache, lengths)
    return network.project(hidden)

  return Eagle(config).init(rng_key, method=use_all)['params']


def check_params(config: EagleConfig, params: Weights) -> None:
  """Raises ValueError unless `target_ids` are distinct tokens of the target."""
  check_target_ids(params['target_ids'], config.vocab_size)


def bind(target: Network, config: EagleConfig, *, width: int) -> Bound:
  """Binds the network to a target, for `drafters.eagle`; the target then keeps
  what the network reads at the first `width` tokens of a call.

  The drafter's params are `{'eagle': ..., 'token_embedder': ...}`: the
  network's, and the token embeddings, the target's unless the network has its
  own. Logits are of the target's vocabulary, those of tokens that are not in
  the draft vocabulary `NEVER`. Raises ValueError if the target's width or
  number of layers does not fit.
  """
  # The network was trained on streams of the target's width.
  target_dim = target.config.embed_dim
  if target_dim != config.target_embed_dim:
    raise ValueError(
      f'the drafter is for a width of {config.target_embed_dim}, not '
      f'{target_dim}: '
      'give the target that it was trained for'
    )
  if not config.has_embedding and config.embed_dim != target_dim:
    raise ValueError(
      f'embed_dim {config.embed_dim} differs from {target_dim}, the '
      "target's, so that the drafter needs embeddings: set has_embedding"
    )
  layers = feature_layers(config, target.num_layers)
  return Bound(
    model=_model(config, target.config.vocab_size),
    target=taps.last_call(target, layers, width=width),
    join=lambda params, eagle_params: {
      'eagle': eagle_params,
      'token_embedder': (
        eagle_params.get('token_embedder') or target.token_embedder(params)
      ),
    },
  )


def _model(config: EagleConfig, vocab_size: int) -> EagleModel:
  """Makes the functions of the network, with logits of `vocab_size` tokens."""
  apply = applied(Eagle(config))

  def init(params: Weights, batch_size: int, max_len: int) -> KVCache:
    return kv_cache.init(config, batch_size, max_len, num_layers=1)

  def join(params: Weights, features: Array) -> Array:
    hidden: Array = apply(params['eagle'], features, method=Eagle.join)
    return hidden

  def extend(
    params: Weights,
    tokens: Array,
    hidden: Array,
    cache: KVCache,
    at: Array | None = None,
    placement: Placement | None = None,
  ) -> tuple[Array, Array, KVCache]:
    embedder = params['token_embedder']
    embeddings = quantized.look_up(embedder, tokens, config.dtype)
    hidden, keys, values = apply(
      params['eagle'],
      embeddings,
      hidden,
      cache.keys[0],
      cache.values[0],
      cache.lengths,
      placement=placement,
    )
    if at is not None:
      hidden = arrays.read_block(hidden, at, 1)
    drafted = apply(params['eagle'], hidden, method=Eagle.project)
    # Logit i is that of the target's token `target_ids[i]`.
    ids = params['eagle']['target_ids']
    logits = spread(drafted, ids, vocab_size)
    lengths = cache.lengths + tokens.shape[1]
    cache = KVCache(keys=(keys,), values=(values,), lengths=lengths)
    return logits, hidden, cache

  return EagleModel(init, join, extend, kv_cache.rewind)
