"""Log-probabilities of decoded tokens and of the likeliest ones in their place,
by teacher forcing: whatever drafted and accepted them, and at no cost to a
decode that asks for none."""

import dataclasses
import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from specdec_jax import arrays
from specdec_jax.assembly import packed_settings, running
from specdec_jax.assembly.decoder import Decoder
from specdec_jax.base import Array, Arrays, Context, Draft, Params, Prompt
from specdec_jax.decoding import state as state_lib
from specdec_jax.decoding.state import DecodeOutput
from specdec_jax.models import families
from specdec_jax.sampling import grammars, logits, processors
from specdec_jax.text.prompts import Batch

# Positions per call of the target: more would need memory for more logits.
_WIDTH = 32
# The likeliest ids at one position, with their log-probabilities.
Top = tuple[tuple[int, float], ...]


class Scored(NamedTuple):
  """Log-probabilities of new tokens, from the first on; on the host.

  Attributes:
    log_probs: float32 `[B, N]`, those of the tokens.
    ids: int32 `[B, N, n]`, the likeliest at each position, the best first.
    values: float32 `[B, N, n]`, the log-probabilities of these.
  """

  log_probs: Arrays
  ids: Arrays
  values: Arrays

  def of_row(self, row: int, count: int) -> tuple[tuple[float, ...], list[Top]]:
    """Returns the first `count` tokens of a row: their log-probabilities, and
    the best of each position, without those of probability zero."""
    tops = [
      tuple((i, x) for i, x in zip(*place, strict=True) if x > -np.inf)
      for place in zip(
        self.ids[row, :count].tolist(),
        self.values[row, :count].tolist(),
        strict=True,
      )
    ]
    return tuple(self.log_probs[row, :count].tolist()), tops


def of_batch(
  decoder: Decoder,
  batch: Batch,
  output: DecodeOutput,
  settings: running.DecodeSettings,
) -> tuple[Scored, Scored] | None:
  """Scores what was decoded: under the model's own softmax, and as processors,
  temperature and limits leave it, for greedy rows as temperature 1 would; None
  unless `settings.top_logprobs` says of how many."""
  if settings.top_logprobs is None:
    return None
  prompt, num_devices = batch.prompt, settings.num_devices
  usual = [decoder.sampling] * prompt.row_ids.size
  how = prompt.sampling or packed_settings.sampling_of_rows(usual, len(usual))
  temperature: Arrays = np.array(how.temperature)
  temperature[temperature == 0] = 1
  how = dataclasses.replace(how, temperature=temperature)
  prompt = dataclasses.replace(prompt, sampling=how)
  vocab_size = decoder.parts.target_info.vocab_size
  num_top = min(settings.top_logprobs, vocab_size)
  score = _scorer(decoder.config, vocab_size, num_top)
  params = running.place(decoder.params.target, num_devices, is_batch=False)
  rows = running.place(
    (prompt, output.tokens, output.lengths), num_devices, is_batch=True
  )
  return jax.device_get(settings.call(lambda: score(params, *rows)))


@functools.cache
def _scorer(
  config: families.Config, vocab_size: int, num: int
) -> Callable[..., tuple[Scored, Scored]]:
  """Compiles `(params, prompt, tokens[B, S], lengths[B]) -> (raw, processed)`,
  one program for each shape."""
  target = families.language_model(config)
  to_probs = logits.standardize(vocab_size=vocab_size)
  rule_out = logits.mask_padding(vocab_size)

  def score(params: Params, prompt: Prompt, tokens: Array, lengths: Array):
    num_rows, capacity = tokens.shape
    prompt = state_lib.checked(prompt, capacity)
    starts, room = prompt.decoder_lengths, capacity + _WIDTH
    nothing = jnp.zeros((num_rows, room), jnp.float32)
    tops = jnp.zeros((num_rows, room, num), jnp.float32)
    scored = Scored(nothing, tops.astype(jnp.int32), tops)

    def score_block(i: Array, carry: Arrays) -> Arrays:
      cache, scores = carry
      # With a prompt [5], new tokens [6, 7, 8] and blocks of 2: reading [5, 6]
      # scores [6, 7], then reading [7, 8] scores [8] and a position beyond the
      # end, which is dropped.
      first = starts + i * _WIDTH
      block = arrays.read_block(tokens, first - 1, _WIDTH + 1)
      raw, cache = target.extend(params, block[:, :-1], cache)
      context = Context(
        tokens=tokens,
        lengths=first,
        sampling=prompt.sampling,
        processors=prompt.processors,
        starts=starts,
        grammar=prompt.grammar,
      )
      processed = processors.after_drafts(raw, context, block[:, 1:])
      _, masks = grammars.read(
        context,
        Draft(
          tokens=block[:, 1:-1],
          probs=None,
          lengths=jnp.full_like(first, _WIDTH - 1),
        ),
        first >= lengths,
        tree=None,
        completes=False,
        vocab_size=raw.shape[2],
      )
      processed = grammars.masked(processed, masks)
      both = (
        rule_out(jax.nn.log_softmax(raw)),
        jnp.log(to_probs(processed, prompt.sampling)),
      )
      new = tuple(
        Scored(arrays.pick(log_probs, block[:, 1:]), ids, values)
        for log_probs in both
        for values, ids in [jax.lax.top_k(log_probs, num)]
      )
      put = functools.partial(
        jax.lax.dynamic_update_slice_in_dim,
        start_index=i * _WIDTH,
        axis=1,
      )
      return cache, jax.tree.map(put, scores, new)

    cache = target.init(params, prompt, room)
    count = -(-jnp.max(lengths - starts) // _WIDTH)
    begin = cache, (scored, scored)
    return jax.lax.fori_loop(0, count, score_block, begin)[1]

  return jax.jit(score)
