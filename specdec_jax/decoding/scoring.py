"""Log-probabilities of given tokens, by one call of the target."""

import dataclasses

import jax
import jax.numpy as jnp

from specdec_jax import arrays, base
from specdec_jax.base import Array, Params
from specdec_jax.decoding import state as state_lib
from specdec_jax.decoding import statistics
from specdec_jax.decoding.statistics import Statistics


@base.value
class ScoreOutput:
  """The target's scores of given tokens.

  Attributes:
    scores: float32 `[B]`, summed log-probabilities; NaN if logits have NaN.
    statistics: counters, of which `num_tokens` and `num_target_runs` count.
  """

  scores: Array
  statistics: Statistics


def score(
  params: Params,
  prompt: base.Prompt,
  tokens: Array,
  lengths: Array,
  *,
  target: base.LanguageModel,
) -> ScoreOutput:
  """Scores `tokens` as a continuation of the prompt, teacher-forced, in one
  target call.

  As T5X's `score_batch`: float32 log-softmax of the model's own logits, before
  temperature, top-k and top-p, padding ids included. The first `lengths[B]` of
  `tokens`, int32 `[B, T]`, count, EOS among them. Reads only `params.target`.
  """
  num_rows, width = tokens.shape
  tokens, lengths = (jnp.asarray(x, jnp.int32) for x in (tokens, lengths))
  max_len = prompt.decoder_tokens.shape[1] + width
  prompt = state_lib.checked(prompt, max_len)
  last = prompt.decoder_lengths - 1
  pending = arrays.read_block(prompt.decoder_tokens, last, 1)
  logits, _ = target.extend(
    params.target,
    jnp.concatenate([pending, tokens[:, :-1]], axis=1),  # targets shifted right
    target.init(params.target, prompt, max_len),
  )
  normalizer = jax.nn.logsumexp(logits, axis=-1)
  log_probs = arrays.pick(logits, tokens) - normalizer
  is_counted = arrays.is_within(lengths, width)
  return ScoreOutput(
    scores=jnp.sum(jnp.where(is_counted, log_probs, 0.0), axis=1),
    statistics=dataclasses.replace(
      statistics.init(num_rows, 0),
      num_tokens=lengths,
      num_target_runs=(lengths > 0).astype(jnp.int32),
    ),
  )
