"""Packs settings of texts in the arrays of a batch."""

import dataclasses
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from specdec_jax import base
from specdec_jax.assembly import text_settings
from specdec_jax.assembly.text_settings import TextSettings, bias_pairs, ids_of
from specdec_jax.sampling import processors
from specdec_jax.text import grammars
from specdec_jax.text.vocabularies import AnyVocabulary

_MOST = text_settings.LARGEST_INT
Packer = Callable[[Sequence[int], base.Prompt], base.Prompt]


def sampling_of_rows(
  settings: Sequence[TextSettings], num_rows: int
) -> base.Sampling:
  """Packs how each row of a batch is sampled; rows beyond `settings`, which
  only fill the batch, keep all tokens."""
  filler = [TextSettings(temperature=1.0)] * (num_rows - len(settings))
  columns: Any = _columns(base.Sampling, [*settings, *filler])
  return base.Sampling(**columns)


def _columns(
  struct: type, settings: Sequence[TextSettings]
) -> dict[str, np.ndarray]:
  """Makes the arrays of a structure that have one number for each row."""
  return {
    column.name: column.packed(getattr(row, name) for row in settings)
    for name, column in text_settings.columns_of(struct).items()
  }


class _Bias(NamedTuple):
  """A bias of the last id of a sequence.

  Attributes:
    sequence: its ids.
    value: what is added.
    until: the bias applies to texts of fewer tokens than this.
    counts_prompt: whether the tokens of the prompt count towards `until`; if
      not, new tokens alone.
    skips_bos: whether a token that `forced_bos_token_id` forces does not count.
  """

  sequence: tuple[int, ...]
  value: float = -math.inf
  until: int = _MOST
  counts_prompt: bool = False
  skips_bos: bool = False


class _Forced(NamedTuple):
  """An id that is forced.

  Attributes:
    token: the id.
    length: that of the text before it, with the prompt.
    counts_limit: whether `length` is added to the longest length of the text;
      -1 is then the last position.
    rank: the processor's place in their order; later ones replace what others
      force after the same text.
    is_suppressed: whether `suppress_tokens` has it.
    is_suppressed_first: whether `begin_suppress_tokens` has it.
  """

  token: int
  length: int
  rank: int
  counts_limit: bool = False
  is_suppressed: bool = False
  is_suppressed_first: bool = False


class _Table(NamedTuple):
  """Arrays with a row for each `TextSettings`; the last changes nothing.

  Attributes:
    rows: what does not depend on a prompt; `until` is as in `_Bias`, and
      `forced_at` as the length in `_Forced`.
    counts_prompt: int32 `[N, C]`, 0 or 1: see `_Bias`.
    skips_bos: likewise.
    ranks: int32 `[N, F]`: see `_Forced`.
    counts_limit: int32 `[N, F]`, 0 or 1: see `_Forced`.
    is_suppressed: bool `[N, F]`: see `_Forced`.
    is_suppressed_first: likewise.
    has_forced_bos: bool `[N]`, whether `forced_bos_token_id` is set.
  """

  rows: base.Processors
  counts_prompt: np.ndarray
  skips_bos: np.ndarray
  ranks: np.ndarray
  counts_limit: np.ndarray
  is_suppressed: np.ndarray
  is_suppressed_first: np.ndarray
  has_forced_bos: np.ndarray


def packer(
  settings: Sequence[TextSettings],
  *,
  eos_ids: Sequence[int],
  vocab_size: int,
  num_logits: int | None = None,
  vocabulary: AnyVocabulary | None = None,
) -> Packer:
  """Makes the arrays of what changes logits by the text: processors, grammars.

  They are made once for all batches, which have one shape.

  Args:
    settings: of all texts.
    eos_ids: those that end a text.
    vocab_size: ids of the model.
    num_logits: ids with the model's padding; None if it has none.
    vocabulary: spells the texts of grammars.

  Returns:
    A function from indices into `settings`, one for each row, and the prompt of
    these rows to the prompt with what changes its logits. Rows beyond the
    indices only fill the batch: their logits stay.

  Raises:
    ValueError: if an id is not of the model, none is left, or a grammar cannot
      be compiled.
    ImportError: without the package that compiles grammars.
  """
  table = _table([*settings, TextSettings()], eos_ids, vocab_size)
  num_logits = num_logits or vocab_size
  numbers = [_grammar_number(row, vocabulary, num_logits) for row in settings]

  def pack(which: Sequence[int], prompt: base.Prompt) -> base.Prompt:
    num_rows = prompt.decoder_lengths.shape[0]
    if any(numbers):
      # All batches of a program have a grammar, or none has.
      row_numbers = [numbers[i] for i in which]
      grammar = _grammar(row_numbers, num_rows, vocabulary, num_logits)
      prompt = dataclasses.replace(prompt, grammar=grammar)
    if table is None:
      return prompt
    index = np.array([*which, *[-1] * (num_rows - len(which))])
    rows = jax.tree.map(lambda values: values[index], table)
    return dataclasses.replace(prompt, processors=_placed(rows, prompt))

  return pack


def _grammar_number(
  settings: TextSettings, vocabulary: AnyVocabulary | None, num_logits: int
) -> int:
  """Returns the number of a grammar among those of `grammars.reader_of`, 0 for
  none; raises as `packer`."""
  name, text = settings.grammar_name, settings.grammar_text()
  if name is None or text is None:
    return 0
  assert vocabulary is not None
  reader = grammars.reader_of(vocabulary, num_logits)
  try:
    return reader.number_of(
      grammars.of_option(name, text), settings.grammar_limits
    )
  except ValueError as error:
    shown = f'regex {text!r:.60}' if name == 'regex' else name
    raise ValueError(f'{shown}: {error}') from error


def _grammar(
  numbers: Sequence[int],
  num_rows: int,
  vocabulary: AnyVocabulary | None,
  num_logits: int,
) -> base.Grammar:
  """Packs the grammars of a batch; rows beyond `numbers` have none."""
  assert vocabulary is not None
  padded = np.zeros(num_rows, np.int32)
  padded[: len(numbers)] = numbers
  read = grammars.reader_of(vocabulary, num_logits)
  return base.Grammar(numbers=padded, read=read)  # type: ignore[arg-type]


def _placed(table: _Table, prompt: base.Prompt) -> base.Processors:
  """Adds what depends on the prompts to the table of their rows."""
  # Products stand for `where`: prompts are arrays of numpy or traced ones.
  rows, lengths = table.rows, prompt.decoder_lengths
  limits, encoded = prompt.max_lengths, prompt.encoder_tokens
  assert limits is not None
  # Behind a decoder's start alone `forced_bos_token_id` forces the first token,
  # and `begin_suppress_tokens` is then about the second.
  is_begun = table.has_forced_bos & (lengths == 1)
  num_begun = is_begun.astype(np.int32)
  first = lengths + num_begun

  # `until` of a batch counts new tokens.
  num_counted = table.counts_prompt * lengths[:, None]
  num_skipped = table.skips_bos * num_begun[:, None]
  until = rows.until - num_counted + num_skipped

  forced_at = rows.forced_at + table.counts_limit * limits[:, None]
  # After one text, the last processor that forces an id counts.
  is_same = forced_at[:, :, None] == forced_at[:, None, :]
  is_later = table.ranks[:, None, :] > table.ranks[:, :, None]
  is_replaced = (is_same & is_later).any(axis=2)
  is_suppressed = table.is_suppressed | (
    table.is_suppressed_first & (forced_at == first[:, None])
  )
  forced = rows.forced + (processors.NONE - rows.forced) * is_suppressed.astype(
    np.int32
  )
  forced_at = forced_at + (_MOST - forced_at) * is_replaced.astype(np.int32)

  if encoded is not None:  # Id 0 is padding.
    nothing = np.int32(processors.NONE)
    encoded = encoded + nothing * (encoded == 0).astype(np.int32)
  # No text has room for a longer n-gram, and each id of one takes time.
  fitting = lambda size: size * (size <= limits).astype(np.int32)
  return dataclasses.replace(
    rows,
    ngram_size=fitting(rows.ngram_size),
    encoder_ngram_size=fitting(rows.encoder_ngram_size),
    encoder_tokens=encoded,
    until=until,
    forced=forced,
    forced_at=forced_at,
  )


def _table(
  settings: Sequence[TextSettings], eos_ids: Sequence[int], vocab_size: int
) -> _Table | None:
  """Makes a table of settings, the last of which change nothing; None if none
  changes anything."""
  biases = [list(_biases(row, eos_ids)) for row in settings]
  forced = [list(_forced(row)) for row in settings]
  for row_biases, row_forced in zip(biases, forced, strict=True):
    _check_ids(row_biases, [entry.token for entry in row_forced], vocab_size)
  columns: Any = _columns(base.Processors, settings)
  is_used = any(np.any(x != x[-1]) for x in columns.values())
  if not (is_used or any(biases) or any(forced)):
    return None
  # Sizes are rounded up to a few, so that few programs are compiled.
  size = lambda most: most and 2 ** (most - 1).bit_length()
  num_biases, num_forced = (size(max(map(len, x))) for x in (biases, forced))
  lengths = [len(bias.sequence) for row in biases for bias in row]
  width = size(max([1, *lengths]))
  arrays: Any = lambda value, *shape: np.full((len(settings), *shape), value)
  rows: Any = base.Processors(
    **columns,
    encoder_tokens=None,
    sequences=arrays(np.int32(processors.ANY), num_biases, width),
    biases=arrays(np.float32(0), num_biases),
    until=arrays(np.int32(1), num_biases),
    forced=arrays(np.int32(0), num_forced),
    # Unused entries are forced at a place that no text reaches.
    forced_at=arrays(np.int32(_MOST), num_forced),
  )
  table = _Table(
    rows=rows,
    counts_prompt=arrays(np.int32(0), num_biases),
    skips_bos=arrays(np.int32(0), num_biases),
    ranks=arrays(np.int32(0), num_forced),
    counts_limit=arrays(np.int32(0), num_forced),
    is_suppressed=arrays(False, num_forced),
    is_suppressed_first=arrays(False, num_forced),
    has_forced_bos=np.array(
      [row.forced_bos_token_id is not None for row in settings]
    ),
  )
  for row, row_biases in enumerate(biases):
    for i, bias in enumerate(row_biases):
      rows.sequences[row, i, width - len(bias.sequence) :] = bias.sequence
      rows.biases[row, i], rows.until[row, i] = bias.value, bias.until
      table.counts_prompt[row, i] = bias.counts_prompt
      table.skips_bos[row, i] = bias.skips_bos
    for i, entry in enumerate(forced[row]):
      rows.forced[row, i], rows.forced_at[row, i] = entry.token, entry.length
      table.ranks[row, i] = entry.rank
      table.counts_limit[row, i] = entry.counts_limit
      table.is_suppressed[row, i] = entry.is_suppressed
      table.is_suppressed_first[row, i] = entry.is_suppressed_first
  return table


def _biases(settings: TextSettings, eos_ids: Sequence[int]) -> Iterator[_Bias]:
  for token, value in bias_pairs(settings.logit_bias):
    yield _Bias(tuple(token), value)
  # Of two biases of a sequence, transformers takes the last.
  by_sequence = {
    tuple(ids): value for ids, value in bias_pairs(settings.sequence_bias)
  }
  for sequence, value in by_sequence.items():
    yield _Bias(sequence, value)
  for token in settings.suppress_tokens or ():
    yield _Bias((token,))
  for token in settings.begin_suppress_tokens or ():
    yield _Bias((token,), until=1, skips_bos=True)
  for word in settings.bad_words_ids or ():
    # As in transformers, an EOS id is not banned as a bad word.
    if len(word) > 1 or word[0] not in eos_ids:
      yield _Bias(tuple(word))
  # If both are given, transformers uses the first, also where it is 0.
  counts_prompt = settings.min_new_tokens is None
  if counts_prompt:
    least = settings.min_length
  else:
    least = settings.min_new_tokens
  if least:
    for token in eos_ids:
      yield _Bias((token,), until=least, counts_prompt=counts_prompt)


def _forced(settings: TextSettings) -> Iterator[_Forced]:
  """Yields ids that are forced, by the ranks of their processors.

  In transformers, `suppress_tokens` and `begin_suppress_tokens` come behind the
  first two; its earlier versions had `forced_decoder_ids`, behind these.
  """
  suppressed = settings.suppress_tokens or ()
  suppressed_first = settings.begin_suppress_tokens or ()
  begins = [
    _Forced(token, length=1, rank=0)
    for token in ids_of(settings.forced_bos_token_id)
  ]
  ends = [
    _Forced(token, length=-1, rank=1, counts_limit=True)
    for token in ids_of(settings.forced_eos_token_id)
  ]
  for entry in (*begins, *ends):
    yield entry._replace(
      is_suppressed=entry.token in suppressed,
      is_suppressed_first=entry.token in suppressed_first,
    )
  by_length: dict[int, int] = {}
  for length, token in settings.forced_decoder_ids or ():
    by_length[length] = token
  for length, token in by_length.items():
    yield _Forced(token, length, rank=2)


def _check_ids(
  biases: Sequence[_Bias], forced: Sequence[int], vocab_size: int
) -> None:
  for token in (*(max(bias.sequence) for bias in biases), *forced):
    if token >= vocab_size:
      raise ValueError(
        f'token {token} is none of the model, whose ids end at {vocab_size - 1}'
      )
  never = {
    bias.sequence
    for bias in biases
    if len(bias.sequence) == 1 and bias.value == -math.inf
  }
  if len(never) == vocab_size:
    raise ValueError('every token is suppressed: leave some of them')
