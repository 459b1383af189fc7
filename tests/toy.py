"""Tiny language models whose distributions can be written down in full.

`toy` looks its logits up in a table by the last two tokens, which it reads back
from a ragged buffer: an entry that is stale, missing or in the wrong place
changes the distribution. `llama` is the real decoder in miniature.
"""

import jax
import jax.numpy as jnp
import numpy as np

from specdec_jax import arrays
from specdec_jax.base import Array, LanguageModel, Placement, Prompt, value
from specdec_jax.models import families
from specdec_jax.models.llama import LlamaConfig, RopeScaling


@value
class ToyCache:
  """Tokens `[B, S]` seen so far, and how many of each row count `[B]`."""

  tokens: Array
  lengths: Array

  @property
  def capacity(self) -> int:
    return self.tokens.shape[1]


def toy(vocab_size: int) -> LanguageModel:
  """A second-order Markov chain; its params are `toy_params`."""

  def init(params, prompt: Prompt, max_len: int) -> ToyCache:
    batch_size = prompt.decoder_tokens.shape[0]
    cache = ToyCache(
      tokens=jnp.zeros((batch_size, max_len), jnp.int32),
      lengths=jnp.zeros(batch_size, jnp.int32),
    )
    _, cache = extend(params, prompt.decoder_tokens[:, :-1], cache)
    return rewind(cache, prompt.decoder_lengths - 1)

  def extend(params, tokens: Array, cache: ToyCache, at=None, placement=None):
    rows = jnp.arange(tokens.shape[0])[:, None]
    positions = arrays.block_positions(cache.lengths, tokens.shape[1])
    buffer = cache.tokens.at[rows, positions].set(tokens, mode='drop')
    if placement is None:
      last = buffer.at[rows, positions].get(mode='clip')
      before = buffer.at[rows, jnp.maximum(positions - 1, 0)].get(mode='clip')
      before = jnp.where(positions > 0, before, vocab_size)
    else:
      last = seen(buffer, placement, 0)
      before = seen(buffer, placement, 1)
    cache = ToyCache(tokens=buffer, lengths=cache.lengths + tokens.shape[1])
    logits = params['table'][before, last]
    if at is not None:
      logits = arrays.read_block(logits, at, 1)
    return logits, cache

  def seen(buffer: Array, placement: Placement, distance: int) -> Array:
    """The first visible token so far before each, or V if there is none."""
    wanted = placement.positions[:, :, None] - distance
    is_it = placement.mask & (placement.key_positions[:, None, :] == wanted)
    entries = jnp.argmax(is_it, axis=-1)
    found = jnp.take_along_axis(buffer, entries, axis=1)
    return jnp.where(jnp.any(is_it, axis=-1), found, vocab_size)

  def rewind(cache: ToyCache, lengths: Array) -> ToyCache:
    return cache.replace(lengths=lengths)

  def gather(
    cache: ToyCache, starts: Array, offsets: Array, span: int
  ) -> ToyCache:
    del span
    rows = jnp.arange(starts.size)[:, None]
    entries = starts[:, None] + offsets
    taken = cache.tokens.at[rows, entries].get(mode='clip')
    places = arrays.block_positions(starts, offsets.shape[1])
    tokens = cache.tokens.at[rows, places].set(taken, mode='drop')
    return cache.replace(tokens=tokens)

  return LanguageModel(init, extend, rewind, vocab_size, gather)


def toy_params(vocab_size: int, *, seed: int, scale: float = 1.5) -> dict:
  """Logits by (token before last, or V for none; last token; next token)."""
  rng = np.random.default_rng(seed)
  shape = (vocab_size + 1, vocab_size, vocab_size)
  return {'table': jnp.asarray(scale * rng.normal(size=shape), jnp.float32)}


def perturb(params, *, seed: int, scale: float = 0.8):
  """The same weights with noise: a drafter that is right most of the time."""
  rng = np.random.default_rng(seed)
  return jax.tree.map(
    lambda a: a + jnp.asarray(scale * rng.normal(size=a.shape), a.dtype), params
  )


# What later models of the kind add: scaled rotary positions, norms of queries
# and keys, and windows, which short texts outgrow, in layers in turn.
LATER_LLAMA = {
  'rope_scaling': RopeScaling(factor=8.0, original_max_positions=16),
  'has_qk_norm': True,
  'windows': (2, 0),
}


# A Qwen3-MoE's.
EXPERTS = {
  'has_qk_norm': True,
  'num_experts': 4,
  'num_chosen_experts': 2,
  'expert_dim': 5,
}


def llama_config(vocab_size: int, *, num_layers: int = 2, **sizes):
  """The sizes of a decoder with four query heads on two key-value heads."""
  defaults = {
    'embed_dim': 8,
    'num_heads': 4,
    'num_kv_heads': 2,
    'head_dim': 4,
    'mlp_dim': 12,
  }
  return LlamaConfig(
    vocab_size=vocab_size, num_layers=num_layers, **(defaults | sizes)
  )


def llama_params(config: LlamaConfig, *, seed: int, scale: float = 1.5):
  """Random weights, the last projection scaled to peaked distributions."""
  rng = np.random.default_rng(seed)

  def draw(path, leaf):
    name = jax.tree_util.keystr(path)
    if 'scale' in name or 'bias' in name:
      values = np.full(leaf.shape, float('scale' in name))
    else:
      # Kernels of experts lie one after the other: [experts, in, out].
      is_expert = 'experts' in name and leaf.ndim == 3
      fan_in = leaf.shape[1] if is_expert else leaf.shape[0]
      if 'embedding' in name:
        fan_in = 1
      values = rng.normal(size=leaf.shape) / np.sqrt(fan_in)
    return jnp.asarray(values * (scale if 'logits' in name else 1), leaf.dtype)

  return jax.tree_util.tree_map_with_path(
    draw, families.param_shapes(config, jnp.float32)
  )


def llama(vocab_size: int, **sizes) -> LanguageModel:
  """The real decoder in miniature; its params are `llama_params`."""
  return families.language_model(llama_config(vocab_size, **sizes))


def compiled(model: LanguageModel) -> LanguageModel:
  """The model for calls outside of a compiled loop, whose every operation would
  be a program of its own."""
  return model._replace(
    init=jax.jit(model.init, static_argnums=2), extend=jax.jit(model.extend)
  )


def prompt(
  rows: list[list[int]],
  *,
  width: int | None = None,
  row_ids: np.ndarray | None = None,
  max_lengths: list[int] | None = None,
  encoder_rows: list[list[int]] | None = None,
  encoder_width: int | None = None,
) -> Prompt:
  """A prompt; the decoder's padding holds tokens that must not matter, the
  encoder's is id 0."""
  width = width or max(map(len, rows))
  tokens = np.full((len(rows), width), 1, np.int32)
  for row, ids in enumerate(rows):
    tokens[row, : len(ids)] = ids
  if row_ids is None:
    row_ids = np.arange(len(rows))
  return Prompt(
    encoder_tokens=_encoder_tokens(encoder_rows, encoder_width),
    decoder_tokens=jnp.asarray(tokens),
    decoder_lengths=jnp.asarray([len(ids) for ids in rows], jnp.int32),
    row_ids=jnp.asarray(row_ids, jnp.int32),
    max_lengths=None
    if max_lengths is None
    else jnp.asarray(max_lengths, jnp.int32),
  )


def _encoder_tokens(rows: list[list[int]] | None, width: int | None):
  if rows is None:
    return None
  tokens = np.zeros((len(rows), width or max(map(len, rows))), np.int32)
  for row, ids in enumerate(rows):
    tokens[row, : len(ids)] = ids
  return jnp.asarray(tokens)
