"""Packs texts in batches, with what each text is told beside its prompt."""

import dataclasses
import functools
import logging
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from specdec_jax.assembly import packed_settings, running
from specdec_jax.assembly.decoder import Decoder
from specdec_jax.assembly.option_fields import plain
from specdec_jax.assembly.running import DecodeSettings, row_keys
from specdec_jax.text import prompts, stop_strings
from specdec_jax.text.prompts import Batch, Text


def by_text(
  num_texts: int, **settings: Any
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
  """Splits settings into those of all texts and those of single texts, which
  are lists of a value for each text; ValueError for a list of another length.

  The second result is empty if there are no such lists.
  """
  settings = plain(settings)
  # stop=['a', 'b'] is for all of two texts, stop=[['a'], ['b']] for each.
  lists = {
    name: value
    for name, value in settings.items()
    if _depth(value) > running.depth(name)
    # No list that is a value of one text has these in it.
    or (
      isinstance(value, list)
      and len(value) == num_texts
      and any(isinstance(x, Mapping | None) for x in value)
    )
  }
  for name, value in lists.items():
    if len(value) != num_texts:
      raise ValueError(
        f'{name} lists {len(value)} for {num_texts} texts: give one value, or '
        'one for each'
      )
  of_all = {name: x for name, x in settings.items() if name not in lists}
  # `DecodeSettings` needs a number; each text's own replaces this 1.
  of_all.setdefault('max_new_tokens', 1)
  if not lists:
    return of_all, []
  columns = zip(*lists.values(), strict=True)
  return of_all, [dict(zip(lists, values, strict=True)) for values in columns]


def _depth(value: Any) -> int:
  """Counts the levels of lists in a value: 2 for [['a'], ['b']]."""
  if not isinstance(value, list):
    return 0
  return 1 + max(map(_depth, value), default=0)


def pack(
  decoder: Decoder,
  texts: Sequence[Text],
  settings: DecodeSettings,
  num_samples: int = 1,
) -> list[Batch]:
  """Packs texts in batches of one shape, each text in `num_samples` rows.

  Raises ValueError if a prompt is too long for the context or has no tokens, or
  no text of the vocabulary holds a stop string.
  """
  settings_of = [settings.of_text(i) for i in range(len(texts))]
  rows = encoded(decoder, texts, settings, settings_of)
  # Two samples of a and b are rows a, a, b, b.
  repeat = lambda items: [x for x in items for _ in range(num_samples)]
  batches = prompts.batches(
    repeat(texts),
    repeat(rows),
    config=decoder.config,
    batch_size=settings.batch_size,
    max_new_tokens=repeat([text.max_new_tokens for text in settings_of]),
    num_rows=settings.num_rows,
  )
  samplings = repeat([text.sampling(decoder.sampling) for text in settings_of])
  stops_of = lambda stop: tuple(decoder.stop if stop is None else stop)
  stops = repeat([stops_of(text.stop) for text in settings_of])
  is_plain = repeat(
    [isinstance(text, str) and not settings.chat for text in texts]
  )
  is_greedy = all(
    sampling.is_greedy for sampling in (*samplings, decoder.sampling)
  )
  # Of 2 samples, those of text 3 are streams 4 and 5 of the seed of all texts,
  # or 0 and 1 of its own.
  has_seed = lambda i: bool(settings.texts) and 'seed' in settings.texts[i]
  seeds = [
    (text.seed, j if has_seed(i) else i * num_samples + j)
    for i, text in enumerate(settings_of)
    for j in range(num_samples)
  ]
  process = packed_settings.packer(
    samplings,
    eos_ids=decoder.parts.target_info.eos_id,
    vocab_size=decoder.parts.target_info.vocab_size,
    num_logits=decoder.target.vocab_size,
    vocabulary=decoder.vocabulary,
  )
  packed = []
  for i, batch in enumerate(batches):
    part = slice(i * settings.batch_size, (i + 1) * settings.batch_size)
    sampling = packed_settings.sampling_of_rows(
      samplings[part], settings.num_rows
    )
    prompt = dataclasses.replace(
      process(range(len(samplings))[part], batch.prompt),
      sampling=None if is_greedy else sampling,
    )
    # Rows that only fill the batch emit nothing: any keys will do.
    columns = np.resize(
      np.array(seeds[part], np.uint32), (settings.num_rows, 2)
    )
    packed.append(
      dataclasses.replace(
        batch,
        prompt=prompt,
        stops=tuple(stops[part]),
        is_plain=tuple(is_plain[part]),
        keys=row_keys(*columns.T),
      )
    )
  return packed


def encoded(
  decoder: Decoder,
  texts: Sequence[Text],
  settings: DecodeSettings,
  settings_of: Sequence[DecodeSettings],
) -> list[list[int]]:
  """Returns the tokens of texts, whose settings are `settings_of`; raises as
  `pack`."""
  for stops in {tuple(text.stop or ()) for text in settings_of}:
    stop_strings.check_vocabulary(stops, decoder.vocabulary)
  limit = decoder.max_positions
  rows = prompts.encode(
    decoder.vocabulary,
    texts,
    config=decoder.config,
    is_chat=settings.chat,
    system=settings.system,
  )
  pairs = zip(rows, settings_of, strict=True)
  for i, (row, text_settings) in enumerate(pairs, start=1):
    num_new = text_settings.max_new_tokens
    if len(row) >= limit:
      raise ValueError(
        f'prompt {i} has {len(row)} tokens, the context {limit}: shorten it'
      )
    # Of a prompt of 90 tokens and 40 new ones in a context of 128, lower to 38.
    needed = prompts.num_positions(decoder.config, len(row), num_new)
    if needed > limit:
      raise ValueError(
        f'prompt {i} has {len(row)} tokens and with {num_new} new ones '
        f'exceeds the context of {limit}: lower max_new_tokens to '
        f'{num_new - (needed - limit)}'
      )
    tell_of_draft_model(decoder, needed)
  return rows


def tell_of_draft_model(decoder: Decoder, num_positions: int) -> None:
  """Logs, once, if texts of so many positions outgrow the context of the draft
  model."""
  limit, model = decoder.draft_positions, decoder.parts.drafting.model
  if num_positions <= limit:
    return
  name = 'the draft model' if model is None else str(model.checkpoint)
  _tell(
    f'{name} has a context of {limit} tokens, and texts may be longer: from '
    'there on they are decoded without drafts'
  )


@functools.cache
def _tell(sentence: str) -> None:
  """Logs a sentence, once."""
  logging.getLogger('specdec_jax').warning(sentence)
