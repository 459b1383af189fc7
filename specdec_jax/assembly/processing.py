"""What changes logits by the text before them: from users' words to arrays."""

import dataclasses
import math
import numbers
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from specdec_jax import base, processors
from specdec_jax.assembly import constraints
from specdec_jax.assembly.option_fields import field_names, option
from specdec_jax.launch.numbers import count, literal, number

_MOST = 2**31 - 1
_penalty = number(float, math.isfinite, 'a finite number')
_ids = literal("a list of token ids, such as '[5, 7]'")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Processing(constraints.Constraint):
  """What changes logits by the text before them, see `processors`; None is what
  the model's own files state, or nothing."""

  repetition_penalty: float | None = option(
    None,
    'divide positive logits of ids in the text, prompt included, by this, and '
    'multiply negative ones',
    type=number(float, lambda x: 0 < x < math.inf, 'a number above 0'),
  )
  presence_penalty: float | None = option(
    None, 'subtract this from logits of ids that were generated', type=_penalty
  )
  frequency_penalty: float | None = option(
    None, 'subtract this as often as an id was generated', type=_penalty
  )
  no_repeat_ngram_size: int | None = option(
    None, 'give no n-gram of so many tokens twice; 0 allows all', type=count
  )
  encoder_repetition_penalty: float | None = option(
    None,
    'the reverse, for ids that the encoder read, or else the prompt has: '
    'multiply positive logits by this',
    type=number(float, lambda x: 0 < x < math.inf, 'a number above 0'),
  )
  encoder_no_repeat_ngram_size: int | None = option(
    None, 'give none of the n-grams of those ids; 0 allows all', type=count
  )
  min_new_tokens: int | None = option(
    None, 'end no text before it has so many new tokens', type=count
  )
  min_length: int | None = option(
    None, 'the same of all tokens of the decoder, with its prompt', type=count
  )
  logit_bias: Mapping[int, float] | None = option(
    None,
    "add to logits by token id, such as '{5: -2.5, 7: 1}'",
    type=literal("numbers by token id, such as '{5: -2.5}'"),
  )
  sequence_bias: Any = option(
    None,
    "add to the logit of a sequence's last id, where the others stand before "
    "it, such as '[[[5, 7], -2.5]]'",
    type=literal("sequences of ids and biases, such as '[[[5, 7], -2.5]]'"),
  )
  suppress_tokens: Sequence[int] | None = option(
    None, "give none of these ids, such as '[5, 7]'", type=_ids
  )
  begin_suppress_tokens: Sequence[int] | None = option(
    None, 'begin with none of these ids', type=_ids
  )
  bad_words_ids: Sequence[Sequence[int]] | None = option(
    None,
    "give none of these sequences of ids, such as '[[5], [7, 8]]'",
    type=literal("lists of token ids, such as '[[5], [7, 8]]'"),
  )
  forced_bos_token_id: int | None = option(
    None, "give this id first, after a decoder's start alone", type=count
  )
  forced_eos_token_id: int | Sequence[int] | None = option(
    None, 'end with this id, or one of these, at the limit', type=_ids
  )
  forced_decoder_ids: Sequence[Sequence[int]] | None = option(
    None,
    "give these ids after so many tokens, prompt included, as '[[1, 5]]'",
    type=literal("pairs of a place and an id, such as '[[1, 5]]'"),
  )


NAMES = tuple(field_names(Processing))
# What changes nothing.
_NEUTRAL = {'repetition_penalty': 1.0, 'encoder_repetition_penalty': 1.0}


class _Bias(NamedTuple):
  """Of the last id of a sequence, for texts of fewer than `until` new tokens,
  or with their prompts, if `is_whole`."""

  sequence: tuple[int, ...]
  value: float = -math.inf
  until: int = _MOST
  is_whole: bool = False


def check(way: Processing) -> None:
  """Raises ValueError for a value that is out of range, or of another type."""
  constraints.check(way)
  for name, (expected, is_valid) in _CHECKS.items():
    value = getattr(way, name)
    if value is not None and not is_valid(value):
      raise ValueError(f'{name} should be {expected}, got {value!r}')


def is_used(way: Processing) -> bool:
  """Whether a way changes any logits, but for a grammar."""
  names = [name for name in NAMES if name not in constraints.NAMES]
  values = {name: getattr(way, name) for name in names}
  # Id 0 is forced like any other.
  return any(
    (value or (value == 0 and name.startswith('forced')))
    and value != _NEUTRAL.get(name)
    for name, value in values.items()
  )


class Table(NamedTuple):
  """Ways as arrays, a row for each, and one of what nobody says.

  Attributes:
    rows: what does not depend on a prompt; of ends, `forced_at` counts back
      from the longest text, which has -1.
    is_whole: int32 `[W + 1, K]`: 1 where `until` counts prompts, too.
  """

  rows: base.Processors
  is_whole: np.ndarray


def table(
  ways: Sequence[Processing], *, eos_ids: Sequence[int], vocab_size: int
) -> Table | None:
  """Makes the arrays of ways, once for all of their batches; None if none of
  them changes anything.

  Args:
    ways: whose batches are to have one shape.
    eos_ids: what ends a text.
    vocab_size: of the model.

  Raises:
    ValueError: if an id is not of the model, or none is left.
  """
  if not any(is_used(way) for way in ways):
    return None
  ways = [*ways, Processing()]
  biases = [list(_biases(way, eos_ids)) for way in ways]
  forced = [list(_forced(way)) for way in ways]
  for each, ids in zip(biases, forced, strict=True):
    _check_ids(each, [token for token, _ in ids], vocab_size)
  # A few sizes, so that programs are compiled for few.
  size = lambda most: most and 2 ** (most - 1).bit_length()
  num_biases, num_forced = (size(max(map(len, x))) for x in (biases, forced))
  width = size(max([1, *(len(b.sequence) for own in biases for b in own)]))
  arrays: Any = lambda value, *shape: np.full((len(ways), *shape), value)
  sequences = arrays(np.int32(processors.ANY), num_biases, width)
  values = arrays(np.float32(0), num_biases)
  until, is_whole = (arrays(np.int32(0), num_biases) for _ in range(2))
  # What nobody forces comes nowhere.
  tokens, places = arrays(np.int32(0), num_forced), arrays(_MOST, num_forced)
  for row, own in enumerate(biases):
    for i, bias in enumerate(own):
      sequences[row, i, width - len(bias.sequence) :] = bias.sequence
      values[row, i], until[row, i] = bias.value, bias.until
      is_whole[row, i] = bias.is_whole
    for i, (token, place) in enumerate(forced[row]):
      tokens[row, i], places[row, i] = token, place

  def column(name: str, kind: type, neutral: float) -> base.Arrays:
    given = [getattr(way, name) for way in ways]
    return np.array([neutral if x is None else x for x in given], kind)

  rows = base.Processors(
    repetition=column('repetition_penalty', np.float32, 1),
    presence=column('presence_penalty', np.float32, 0),
    frequency=column('frequency_penalty', np.float32, 0),
    ngram_size=column('no_repeat_ngram_size', np.int32, 0),
    encoder_repetition=column('encoder_repetition_penalty', np.float32, 1),
    encoder_ngram_size=column('encoder_no_repeat_ngram_size', np.int32, 0),
    encoder_tokens=None,
    sequences=sequences,
    biases=values,
    until=until,
    forced=tokens,
    forced_at=places.astype(np.int32),
  )
  return Table(rows, is_whole)


def of_rows(
  made: Table | None, which: Sequence[int], prompt: base.Prompt
) -> base.Prompt:
  """A prompt with what changes the logits of its rows: of row i way `which[i]`,
  of rows beyond these, which are nobody's, nothing."""
  if made is None:
    return prompt
  lengths, encoded = prompt.decoder_lengths, prompt.encoder_tokens
  index = np.array([*which, *[-1] * (lengths.shape[0] - len(which))])
  rows = jax.tree.map(lambda values: values[index], made.rows)
  assert prompt.max_lengths is not None
  ends = np.int32(rows.forced_at < 0) * prompt.max_lengths[:, None]
  if encoded is not None:  # Id 0 is padding.
    nothing = np.int32(processors.NONE)
    encoded = encoded + nothing * (encoded == 0).astype(np.int32)
  rows = dataclasses.replace(
    rows,
    encoder_tokens=encoded,
    until=rows.until - made.is_whole[index] * lengths[:, None],
    forced_at=rows.forced_at + ends,
  )
  return dataclasses.replace(prompt, processors=rows)


def _biases(way: Processing, eos_ids: Sequence[int]) -> Iterator[_Bias]:
  for token, value in (way.logit_bias or {}).items():
    yield _Bias((_id_of(token),), value)
  for sequence, value in _pairs(way.sequence_bias):
    yield _Bias(tuple(sequence), value)
  for token in way.suppress_tokens or ():
    yield _Bias((token,))
  for token in way.begin_suppress_tokens or ():
    yield _Bias((token,), until=1)
  for word in way.bad_words_ids or ():
    # As in transformers: an end of text is no bad word.
    if len(word) > 1 or word[0] not in eos_ids:
      yield _Bias(tuple(word))
  # Of both, transformers heeds the first.
  is_whole = not way.min_new_tokens
  if least := way.min_new_tokens or way.min_length:
    for token in eos_ids:
      yield _Bias((token,), until=min(least, _MOST), is_whole=is_whole)


def _forced(way: Processing) -> Iterator[tuple[int, int]]:
  """Yields ids that are forced, and how long the text before each is; -1 is one
  less than the longest."""
  if way.forced_bos_token_id is not None:
    yield way.forced_bos_token_id, 1
  for place, token in way.forced_decoder_ids or ():
    yield token, place
  ends = way.forced_eos_token_id
  if ends is not None:
    for end in [ends] if isinstance(ends, int) else ends:
      yield end, -1


def _pairs(biases: Any) -> Iterable[tuple[Sequence[int], float]]:
  """Sequences and their biases, of a mapping, or of a list as JSON has it."""
  return biases.items() if isinstance(biases, Mapping) else biases or ()


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


def _is_number(value: Any) -> bool:
  is_number = isinstance(value, numbers.Real) and not isinstance(value, bool)
  return is_number and math.isfinite(value)


def _is_id(value: object) -> bool:
  return type(value) is int and 0 <= value <= _MOST


def _are_ids(values: object) -> bool:
  return isinstance(values, list | tuple) and all(map(_is_id, values))


def _are_sequences(values: Any) -> bool:
  is_list = isinstance(values, list | tuple)
  return is_list and all(each and _are_ids(each) for each in values)


def _are_biases(pairs: Iterable[object]) -> bool:
  """Whether they are sequences of ids, each with a bias."""
  return all(
    isinstance(pair, list | tuple)
    and len(pair) == 2
    and _are_sequences(pair[:1])
    and (_is_number(pair[1]) or pair[1] == -math.inf)
    for pair in pairs
  )


def _id_of(key: Any) -> Any:
  """A token id; JSON has them as texts."""
  return int(key) if isinstance(key, str) and key.isdecimal() else key


_ABOVE_0 = 'a finite number above 0', lambda x: _is_number(x) and x > 0
_NUMBER = 'a finite number', _is_number
_COUNT = 'an integer from 0 on', _is_id
_IDS = 'a list of token ids', _are_ids
# What each should be, and whether a value is that.
_CHECKS: dict[str, tuple[str, Callable[[Any], bool]]] = {
  'repetition_penalty': _ABOVE_0,
  'presence_penalty': _NUMBER,
  'frequency_penalty': _NUMBER,
  'no_repeat_ngram_size': _COUNT,
  'encoder_repetition_penalty': _ABOVE_0,
  'encoder_no_repeat_ngram_size': _COUNT,
  'min_new_tokens': _COUNT,
  'min_length': _COUNT,
  'logit_bias': (
    'numbers below infinity by token id, such as {5: -2.5}',
    lambda x: (
      isinstance(x, Mapping)
      and _are_biases(((_id_of(i),), bias) for i, bias in x.items())
    ),
  ),
  'sequence_bias': (
    'sequences of ids, each with a number, such as [[[5, 7], -2.5]]',
    lambda x: isinstance(x, Mapping | list | tuple) and _are_biases(_pairs(x)),
  ),
  'suppress_tokens': _IDS,
  'begin_suppress_tokens': _IDS,
  'bad_words_ids': ('lists of token ids', _are_sequences),
  'forced_bos_token_id': ('a token id', _is_id),
  'forced_eos_token_id': ('token ids', lambda x: _is_id(x) or _are_ids(x)),
  'forced_decoder_ids': (
    'pairs of a place and an id',
    lambda x: _are_sequences(x) and all(len(pair) == 2 for pair in x),
  ),
}
