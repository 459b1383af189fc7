"""Alpha on texts that are there, for several draft models at once.

What `calibration.overlaps` finds while the target generates, one call per
token, is found here by one call per text, on the same prefixes for every draft
model, so that two of them can be compared row by row.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp

from specdec_jax import distributions
from specdec_jax.base import (
  Array,
  LanguageModel,
  LogitsToProbsFn,
  Params,
  Prompt,
)


def row_sums(
  params: Params,
  prompt: Prompt,
  tokens: Array,
  lengths: Array,
  *,
  target: LanguageModel,
  draft_models: Sequence[LanguageModel],
  logits_to_probs: LogitsToProbsFn,
) -> tuple[Array, Array]:
  """Sums of `sum min(p, q)` over the prefixes of each text; jit it whole.

  On texts that the target generated, sums over counts are alpha as Leviathan et
  al. define it (Sec. 3.1, https://arxiv.org/abs/2211.17192).

  Args:
    params: weights of the target, and in `drafter` those of each draft model.
    prompt: what the texts begin with; it counts for nothing.
    tokens: int32 `[B, S]`, the prompt and what follows it; 0 after the end.
    lengths: int32 `[B]`, with the prompt.
    target: the model that wrote the texts.
    draft_models: D of them.
    logits_to_probs: how all of them are sampled.

  Returns:
    Sums float32 `[D, B]`, and int32 `[B]`, of how many prefixes.
  """
  # From its first token on, so that all rows begin alike.
  start = dataclasses.replace(
    prompt,
    decoder_tokens=tokens[:, :1],
    decoder_lengths=jnp.ones_like(prompt.decoder_lengths),
    max_lengths=None,
  )

  def probs(model: LanguageModel, weights: Any) -> Array:
    cache = model.init(weights, start, tokens.shape[1])
    logits, _ = model.extend(weights, tokens[:, :-1], cache)
    return logits_to_probs(logits)

  p = probs(target, params.target)
  places = jnp.arange(1, tokens.shape[1], dtype=lengths.dtype)[None]
  is_counted = (places >= prompt.decoder_lengths[:, None]) & (
    places < lengths[:, None]
  )
  sums = []
  for model, weights in zip(draft_models, params.drafter, strict=True):
    shared = distributions.overlap(p, probs(model, weights))
    # Sums of float32 probabilities may exceed one by their rounding.
    shared = jnp.where(is_counted, jnp.minimum(shared, 1.0), 0.0)
    sums.append(shared.sum(axis=1))
  return jnp.stack(sums), is_counted.sum(axis=1, dtype=jnp.int32)
