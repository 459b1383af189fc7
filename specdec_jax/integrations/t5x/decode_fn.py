"""A `decode_fn` for T5X's own models (needs no T5X)."""

from typing import Any

from specdec_jax.base import Array
from specdec_jax.integrations.t5x import contract, decoding
from specdec_jax.integrations.t5x.decoding import Speculation
from specdec_jax.integrations.t5x.t5_networks import refusal


def speculative_decode(
  inputs: Array,
  cache: Any,
  tokens_to_logits: Any,
  eos_id: int,
  decode_rng: Array | None = None,
  num_decodes: int = 1,
  cache_offset: int = 0,
  initial_index: Array | None = None,
  **speculation: Any,
) -> tuple[Array, Array]:
  """A `decode_fn` for T5X's own models, with every drafter but 'model'.

  Args:
    inputs: int32 `[B, L]`, forced tokens.
    tokens_to_logits: T5X's step by one token, a `functools.partial` of a method
      of the model, which brings all else that is needed.
    decode_rng: a key, or None for the seed 0.
    cache_offset: 0; T5X passes 1 for scanned layers.
    initial_index: int32 `[B]`, where the last token of each prompt stands; None
      where the first forced tokens end.
    **speculation: of `Speculation`; 'model' is no drafter here. What is not
      given of the sampling is what gin binds for T5X's `temperature_sample`.

  Returns:
    int32 `[B, 1, L]` and float32 `[B, 1]`.

  Raises:
    ValueError: if `tokens_to_logits` is not as T5X makes it, the network is not
      known, or more than one decode is asked for.
  """
  del cache  # The compiler drops it, and T5X's encoder pass.
  contract.check_num_decodes(num_decodes)
  if cache_offset:
    raise refusal(
      'the network scans its layers, which speculation does not support'
    )
  settings = Speculation(**(contract.sampling_of_t5x() | speculation))
  if settings.drafter == 'model':
    raise refusal(
      'a decode_fn has no draft model: use SpeculativeEncoderDecoderModel or '
      'SpeculativeDecoderOnlyModel'
    )
  model, params, encoder_tokens = contract.reach(tokens_to_logits)
  prompt = decoding.prompt_of(encoder_tokens, inputs, initial_index)
  networks = decoding.networks(
    settings, model.module, None, model.output_vocabulary
  )
  output = decoding.decode(
    params,
    decode_rng,
    prompt,
    speculation=settings,
    networks=networks,
    max_len=inputs.shape[1] + 1,
    eos_id=eos_id,
    forced=inputs,
  )
  scores = decoding.counters(output)['scores']
  return output.tokens[:, None, 1:], scores[:, None]
