"""Logits processors: checks users' options and packs them in arrays."""

import dataclasses
import math
import numbers
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from specdec_jax import base
from specdec_jax.assembly import constraints
from specdec_jax.assembly.option_fields import options_of
from specdec_jax.launch.numbers import literal
from specdec_jax.sampling import processors
from specdec_jax.text.vocabularies import AnyVocabulary

_MOST = 2**31 - 1
# Stand for numbers of tokens that depend on a prompt: of `_Bias.until` and of
# `_Forced.length`.
_BEGIN, _END = 0, -1
# Of float32: what is larger would be infinite.
_LARGEST = float(np.finfo(np.float32).max)
Packer = Callable[[Sequence[int], base.Prompt], base.Prompt]


def _is_number(value: Any, least: float = -_LARGEST) -> bool:
  is_number = isinstance(value, numbers.Real) and not isinstance(value, bool)
  return is_number and least <= value <= _LARGEST


def _is_id(value: object) -> bool:
  return type(value) is int and 0 <= value <= _MOST


def _are_ids(values: object) -> bool:
  return isinstance(values, list | tuple) and all(map(_is_id, values))


def _are_sequences(values: Any) -> bool:
  is_list = isinstance(values, list | tuple)
  return is_list and all(ids and _are_ids(ids) for ids in values)


def _are_biases(biases: object) -> bool:
  return isinstance(biases, Mapping | list | tuple) and all(
    isinstance(pair, list | tuple)
    and len(pair) == 2
    and _are_sequences(pair[:1])
    and _is_number(pair[1], -math.inf)
    for pair in _pairs(biases)
  )


def _pairs(biases: Any) -> Iterable[Any]:
  """Returns sequences and their biases, from a list as JSON has it, or from a
  mapping, in which a single id stands for itself, in JSON as a string."""
  if not isinstance(biases, Mapping):
    return biases or ()
  key = lambda x: int(x) if isinstance(x, str) and x.isdecimal() else x
  return [
    (x if isinstance(x, tuple) else (key(x),), bias)
    for x, bias in biases.items()
  ]


def _setting(help: str, expected: str, is_valid: Callable[[Any], bool]) -> Any:
  """Declares an option, typed as in Python, whose values `check` checks."""
  metadata = {'expected': expected, 'is_valid': is_valid}
  metadata |= {'help': help, 'type': literal(expected)}
  return dataclasses.field(default=None, metadata=metadata)


_ABOVE_0 = 'a finite number above 0', lambda x: _is_number(x) and x > 0
_NUMBER = 'a finite number', _is_number
_COUNT = 'an integer from 0 on', _is_id
_IDS = "a list of token ids, such as '[5, 7]'", _are_ids


@dataclasses.dataclass(frozen=True, kw_only=True)
class Processing(constraints.Constraint):
  """Processors of logits, which depend on the text so far; see `processors`.
  None stands for what the model's own files state, or for nothing."""

  repetition_penalty: float | None = _setting(
    'divide positive logits of ids in the text, prompt included, by this, and '
    'multiply negative ones',
    *_ABOVE_0,
  )
  presence_penalty: float | None = _setting(
    'subtract this from logits of ids that were generated', *_NUMBER
  )
  frequency_penalty: float | None = _setting(
    'subtract this as often as an id was generated', *_NUMBER
  )
  no_repeat_ngram_size: int | None = _setting(
    'give no n-gram of so many tokens twice; 0 allows all', *_COUNT
  )
  encoder_repetition_penalty: float | None = _setting(
    'the reverse, for ids that the encoder read, or else the prompt has: '
    'multiply positive logits by this',
    *_ABOVE_0,
  )
  encoder_no_repeat_ngram_size: int | None = _setting(
    'give none of the n-grams of those ids; 0 allows all', *_COUNT
  )
  min_new_tokens: int | None = _setting(
    'end no text before it has so many new tokens', *_COUNT
  )
  min_length: int | None = _setting(
    'end no text before its decoder has this many tokens, prompt included',
    *_COUNT,
  )
  logit_bias: Mapping[int, float] | None = _setting(
    'add to logits by token id',
    "numbers below infinity by token id, such as '{5: -2.5}'",
    lambda x: isinstance(x, Mapping) and _are_biases(x),
  )
  sequence_bias: Sequence[Any] | Mapping[Any, float] | None = _setting(
    "add to the logit of a sequence's last id, where the others stand before "
    'it',
    "sequences of ids, each with a number, such as '[[[5, 7], -2.5]]'",
    _are_biases,
  )
  suppress_tokens: Sequence[int] | None = _setting(
    'give none of these ids', *_IDS
  )
  begin_suppress_tokens: Sequence[int] | None = _setting(
    'begin with none of these ids', *_IDS
  )
  bad_words_ids: Sequence[Sequence[int]] | None = _setting(
    'give none of these sequences of ids',
    "lists of token ids, such as '[[5], [7, 8]]'",
    _are_sequences,
  )
  forced_bos_token_id: int | None = _setting(
    "give this id first, after a decoder's start alone", 'a token id', _is_id
  )
  forced_eos_token_id: int | Sequence[int] | None = _setting(
    'end with this id, or one of these, at the limit',
    "a token id, or some, such as '[5, 7]'",
    lambda x: _is_id(x) or _are_ids(x),
  )
  forced_decoder_ids: Sequence[Sequence[int]] | None = _setting(
    'pairs of a position, from 0 and with the prompt, and the id that is there',
    "pairs of a position and an id, such as '[[1, 5]]'",
    lambda x: _are_sequences(x) and all(len(pair) == 2 for pair in x),
  )


# For each field of `base.Processors`: the setting, its type, and the value that
# changes nothing.
_COLUMNS = {
  'repetition': ('repetition_penalty', np.float32, 1),
  'presence': ('presence_penalty', np.float32, 0),
  'frequency': ('frequency_penalty', np.float32, 0),
  'ngram_size': ('no_repeat_ngram_size', np.int32, 0),
  'encoder_repetition': ('encoder_repetition_penalty', np.float32, 1),
  'encoder_ngram_size': ('encoder_no_repeat_ngram_size', np.int32, 0),
}


class _Bias(NamedTuple):
  """A bias of the last id of a sequence.

  Attributes:
    sequence: its ids.
    value: what is added.
    until: the bias applies to texts of fewer new tokens than this; a negative
      number is one of all tokens, the prompt's included. With `_BEGIN` it
      applies until the first token that is not forced by
      `forced_bos_token_id`.
  """

  sequence: tuple[int, ...]
  value: float = -math.inf
  until: int = _MOST


class _Forced(NamedTuple):
  """An id that is forced.

  Attributes:
    token: the id.
    length: that of the text before it, with the prompt; `_END` is one less than
      the longest text.
    rank: the processor's place in their order; later ones replace what others
      force after the same text.
    is_suppressed: whether `suppress_tokens` has it.
    is_suppressed_first: whether `begin_suppress_tokens` has it.
  """

  token: int
  length: int
  rank: int
  is_suppressed: bool = False
  is_suppressed_first: bool = False


class _Table(NamedTuple):
  """Arrays with a row for each sampling, of which the last changes nothing.

  Attributes:
    rows: what does not depend on a prompt; `until` is as in `_Bias`, and
      `forced_at` as the length in `_Forced`.
    ranks: int32 `[N, F]`, and what follows bool `[N, F]`: see `_Forced`.
    is_suppressed: likewise.
    is_suppressed_first: likewise.
    has_forced_bos: bool `[N]`, whether `forced_bos_token_id` is set.
  """

  rows: base.Processors
  ranks: np.ndarray
  is_suppressed: np.ndarray
  is_suppressed_first: np.ndarray
  has_forced_bos: np.ndarray


def check(sampling: Processing) -> None:
  """Raises ValueError for a value that is out of range, or of another type, and
  for ids that are forced and never allowed."""
  constraints.check(sampling)
  for name, field in options_of(Processing).items():
    is_valid, value = field.metadata.get('is_valid'), getattr(sampling, name)
    if value is not None and is_valid and not is_valid(value):
      expected = field.metadata['expected']
      raise ValueError(f'{name} should be {expected}, got {value!r}')
  for name in ('forced_bos_token_id', 'forced_eos_token_id'):
    forced = _ids(getattr(sampling, name))
    if forced and set(forced) <= {*(sampling.suppress_tokens or ())}:
      raise ValueError(
        f'{name} forces {list(forced)}, which suppress_tokens rules out: take '
        'them out of one of the two'
      )


def _ids(ids: int | Sequence[int] | None) -> Sequence[int]:
  """Returns ids that are given as one, several or none as a sequence."""
  if ids is None:
    return ()
  return (ids,) if isinstance(ids, int) else ids


def packer(
  samplings: Sequence[Processing],
  *,
  eos_ids: Sequence[int],
  vocab_size: int,
  num_logits: int | None = None,
  vocabulary: AnyVocabulary | None = None,
) -> Packer:
  """Makes the arrays of samplings, once for all batches, which have one shape.

  `num_logits` counts the model's padding as well, None if it has none; tokens
  of `vocabulary` spell the texts of grammars.

  Returns a function from the numbers of samplings, one for each row, and the
  prompt of these rows to the prompt with what changes its logits. Rows beyond
  the numbers only fill the batch: their logits stay. Raises ValueError if an id
  is not of the model, none is left, or a grammar cannot be compiled, and
  ImportError without the package that compiles grammars.
  """
  table = _table([*samplings, Processing()], eos_ids, vocab_size)
  num_logits = num_logits or vocab_size
  numbers = [constraints.number(x, vocabulary, num_logits) for x in samplings]

  def pack(which: Sequence[int], prompt: base.Prompt) -> base.Prompt:
    num_rows = prompt.decoder_lengths.shape[0]
    if any(numbers):
      # All batches of a program have a grammar, or none has.
      of_rows = [numbers[i] for i in which]
      grammar = constraints.of_rows(of_rows, num_rows, vocabulary, num_logits)
      prompt = dataclasses.replace(prompt, grammar=grammar)
    if table is None:
      return prompt
    index = np.array([*which, *[-1] * (num_rows - len(which))])
    rows = jax.tree.map(lambda values: values[index], table)
    return dataclasses.replace(prompt, processors=_placed(rows, prompt))

  return pack


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
  starts = np.int32(rows.until < 0) * lengths[:, None]
  begins = np.int32(rows.until == _BEGIN) * (1 + num_begun[:, None])
  until = abs(rows.until) - starts + begins

  forced_at = (
    rows.forced_at + np.int32(rows.forced_at == _END) * limits[:, None]
  )
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
  samplings: Sequence[Processing], eos_ids: Sequence[int], vocab_size: int
) -> _Table | None:
  """Makes a table of samplings, the last of which changes nothing; None if no
  sampling changes anything."""
  biases = [list(_biases(sampling, eos_ids)) for sampling in samplings]
  forced = [list(_forced(sampling)) for sampling in samplings]
  for row_biases, row_forced in zip(biases, forced, strict=True):
    _check_ids(row_biases, [entry.token for entry in row_forced], vocab_size)
  columns: dict[str, Any] = {}
  for column, (name, dtype, neutral) in _COLUMNS.items():
    values = (getattr(sampling, name) for sampling in samplings)
    filled = [neutral if value is None else value for value in values]
    columns[column] = np.array(filled, dtype)
  is_used = any(np.any(x != x[-1]) for x in columns.values())
  if not (is_used or any(biases) or any(forced)):
    return None
  # Sizes are rounded up to a few, so that few programs are compiled.
  size = lambda most: most and 2 ** (most - 1).bit_length()
  num_biases, num_forced = (size(max(map(len, x))) for x in (biases, forced))
  lengths = [len(bias.sequence) for row in biases for bias in row]
  width = size(max([1, *lengths]))
  arrays: Any = lambda value, *shape: np.full((len(samplings), *shape), value)
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
    ranks=arrays(np.int32(0), num_forced),
    is_suppressed=arrays(False, num_forced),
    is_suppressed_first=arrays(False, num_forced),
    has_forced_bos=np.array(
      [sampling.forced_bos_token_id is not None for sampling in samplings]
    ),
  )
  for row, row_biases in enumerate(biases):
    for i, bias in enumerate(row_biases):
      rows.sequences[row, i, width - len(bias.sequence) :] = bias.sequence
      rows.biases[row, i], rows.until[row, i] = bias.value, bias.until
    for i, one in enumerate(forced[row]):
      rows.forced[row, i], rows.forced_at[row, i] = one.token, one.length
      table.ranks[row, i] = one.rank
      table.is_suppressed[row, i] = one.is_suppressed
      table.is_suppressed_first[row, i] = one.is_suppressed_first
  return table


def _biases(sampling: Processing, eos_ids: Sequence[int]) -> Iterator[_Bias]:
  for token, value in _pairs(sampling.logit_bias):
    yield _Bias(tuple(token), value)
  # Of two biases of a sequence, transformers takes the last.
  by_sequence = {tuple(x): bias for x, bias in _pairs(sampling.sequence_bias)}
  for sequence, value in by_sequence.items():
    yield _Bias(sequence, value)
  for token in sampling.suppress_tokens or ():
    yield _Bias((token,))
  for token in sampling.begin_suppress_tokens or ():
    yield _Bias((token,), until=_BEGIN)
  for word in sampling.bad_words_ids or ():
    # As in transformers, an EOS id is not banned as a bad word.
    if len(word) > 1 or word[0] not in eos_ids:
      yield _Bias(tuple(word))
  # If both are given, transformers uses the first, also where it is 0.
  if sampling.min_new_tokens is None:
    least = -(sampling.min_length or 0)
  else:
    least = sampling.min_new_tokens
  if least:
    for token in eos_ids:
      yield _Bias((token,), until=least)


def _forced(sampling: Processing) -> Iterator[_Forced]:
  """Yields ids that are forced, by the ranks of their processors.

  In transformers, `suppress_tokens` and `begin_suppress_tokens` come behind the
  first two; its earlier versions had `forced_decoder_ids`, behind these.
  """
  suppressed = sampling.suppress_tokens or ()
  suppressed_first = sampling.begin_suppress_tokens or ()
  ends = [(token, _END) for token in _ids(sampling.forced_eos_token_id)]
  begins = [(token, 1) for token in _ids(sampling.forced_bos_token_id)]
  for rank, pairs in enumerate((begins, ends)):
    for token, length in pairs:
      is_suppressed = token in suppressed
      is_suppressed_first = token in suppressed_first
      yield _Forced(token, length, rank, is_suppressed, is_suppressed_first)
  by_length: dict[int, int] = {}
  for length, token in sampling.forced_decoder_ids or ():
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
