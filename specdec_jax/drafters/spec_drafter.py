"""SpecDec's drafter: a block in one pass (Xia et al., arXiv 2203.16487)."""

from collections.abc import Callable
from typing import NamedTuple

import jax.numpy as jnp

from specdec_jax import arrays, base
from specdec_jax.base import Array, Arrays, Context, Draft, Drafter
from specdec_jax.drafters.stateless import check_gamma
from specdec_jax.sampling.logits import mask_padding


class BlockModel(NamedTuple):
  """A network that fills a block of unknown tokens, as two pure functions.

  Attributes:
    init: `(params, encoder_tokens[B, E], num_positions) -> memory`: computes
      what depends on the source alone, for texts of up to `num_positions`
      tokens, the block included.
    predict: `(params, tokens[B, N], lengths[B], memory, width) ->
      logits[B, width, V]`: float32 logits of tokens `lengths[b]` to
      `lengths[b] + width - 1`, given only those before the block. `tokens` and
      `lengths` are without the decoder's start token.
    vocab_size: V.
  """

  init: Callable[[Arrays, Array, int], Arrays]
  predict: Callable[[Arrays, Array, Array, Arrays, int], Array]
  vocab_size: int


def spec_drafter(
  model: BlockModel, *, gamma: int, vocab_size: int | None = None
) -> Drafter:
  """Drafts the likeliest token of each of gamma positions, in one pass.

  https://arxiv.org/abs/2203.16487, where gamma is k. Works with any target that
  has the same source and vocabulary. What depends on the source is computed
  once per decode: the encoder's output, its keys and values, and the embeddings
  of the masks. Nothing else can be cached: the decoder attends in both
  directions over prefix and masks, so the prefix's hidden states change when
  the block moves. q is one-hot and never materialised.

  The model is from `models.drafting.block_decoder`, its params are the
  drafter's, and it may be trained with another k. Ids from `vocab_size` on are
  padding and never drafted. Raises ValueError if `gamma` is below 1, or the
  prompt has no source.
  """
  check_gamma(gamma)
  rule_out_padding = mask_padding(vocab_size or model.vocab_size)

  def init(params: Arrays, prompt: base.Prompt, max_len: int) -> Arrays:
    if prompt.encoder_tokens is None:
      raise ValueError('it needs encoder tokens: give a prompt with a source')
    return model.init(params, prompt.encoder_tokens, max_len - 1 + gamma)

  def propose(
    params: Arrays, row_keys: Array, context: Context, memory: Arrays
  ) -> tuple[Draft, Arrays]:
    del row_keys
    text = jnp.pad(context.tokens[:, 1:], ((0, 0), (0, gamma)))  # without start
    block_logits = model.predict(
      params, text, context.lengths - 1, memory, gamma
    )
    draft = Draft(
      tokens=arrays.argmax(rule_out_padding(block_logits)),
      probs=None,
      lengths=jnp.full_like(context.lengths, gamma),
    )
    return draft, memory

  return Drafter(gamma, init, propose)
