"""Adapts a decoder to the two functions that `specdec_jax.audit` takes."""

import dataclasses
import functools
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from specdec_jax.assembly import packing, running
from specdec_jax.assembly.decoder import Decoder
from specdec_jax.assembly.running import DecodeSettings
from specdec_jax.decoding import state as state_lib
from specdec_jax.sampling import processors
from specdec_jax.text.prompts import Text

Tokens = tuple[int, ...]


def engine(
  decoder: Decoder,
  texts: Sequence[Text],
  settings: DecodeSettings,
  advance: Callable[[int], None] = lambda num_drawn: None,
) -> tuple[
  Callable[[Tokens, int, int], list[list[int]]], Callable[[Tokens], np.ndarray]
]:
  """Makes `sample` and `next_probs`, whose prompts are indices of texts.

  The probabilities are of one call of the target without a draft, with the
  decoder's sampling. `advance` is called with the number of texts that were
  drawn. Raises as `packing.pack`.
  """

  @functools.cache
  def drawn(num: int, seed: int) -> list[list[int]]:
    seed_settings = dataclasses.replace(settings, seed=seed)
    # Texts alternate, so that a batch has rows of different lengths.
    batches = packing.pack(decoder, [*texts] * num, seed_settings)
    decode = running.compile_decode(decoder, batches[0], seed_settings)
    rows = []
    for batch in batches:
      output = jax.device_get(decode(batch, ()))
      starts = np.asarray(batch.prompt.decoder_lengths)
      for row in range(len(batch.texts)):
        new = output.tokens[row, starts[row] : output.lengths[row]]
        rows.append(new.tolist())
      advance(len(batch.texts))
    return rows

  one_row = dataclasses.replace(settings, batch_size=1, num_devices=1)
  prompts = [batch.prompt for batch in packing.pack(decoder, texts, one_row)]
  to_probs = decoder.sampling.to_probs(decoder.parts.target_info.vocab_size)
  max_len = prompts[0].decoder_tokens.shape[1] + settings.max_new_tokens

  @jax.jit
  def after(params, prompt, tokens):
    # The prompt's last token is not in the cache yet: of prompt [5, 6, 7] and
    # tokens [8, 9], [7, 8, 9] are fed.
    last = prompt.decoder_tokens[:, prompt.decoder_lengths[0] - 1][:, None]
    fed = jnp.concatenate([last, tokens], axis=1)
    cache = decoder.target.init(params, prompt, max_len)
    logits, _ = decoder.target.extend(params, fed, cache)
    begun = state_lib.init(
      jax.random.key(0), prompt, cache, (), gamma=0, max_len=max_len
    )
    return to_probs(processors.after_drafts(logits, begun.context, tokens))[0]

  def next_probs(prefix: Tokens) -> np.ndarray:
    # Feed all tokens but the last: [pending, t_1 .. t_(L-1)].
    fed = np.zeros((1, settings.max_new_tokens - 1), np.int32)
    fed[0, : len(prefix) - 1] = prefix[1:]
    probs = after(decoder.params.target, prompts[prefix[0]], fed)
    return np.asarray(probs[len(prefix) - 1])

  def sample(prompt: Tokens, num: int, seed: int) -> list[list[int]]:
    return drawn(num, seed)[prompt[0] :: len(texts)]

  return sample, next_probs
