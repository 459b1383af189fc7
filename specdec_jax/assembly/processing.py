"""What changes logits by the text before them: from users' words to arrays."""

import dataclasses
import math
import numbers
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from specdec_jax import base, processors
from specdec_jax.assembly.option_fields import field_names, option
from specdec_jax.launch.numbers import count, literal, number
from specdec_jax.launch.spelling import did_you_mean

_MOST = 2**31 - 1
_penalty = number(float, math.isfinite, 'a finite number')
_ids = literal("a list of token ids, such as '[5, 7]'")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Processing:
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


NAMES = tuple(field_names(Processing))
# What changes nothing.
_NEUTRAL = {'repetition_penalty': 1.0}


class _Bias(NamedTuple):
  """Of the last id of a sequence, for texts of fewer than `until` new tokens,
  or with their prompts, if `is_whole`."""

  sequence: tuple[int, ...]
  value: float = -math.inf
  until: int = _MOST
  is_whole: bool = False


def check(way: Processing) -> None:
  """Raises ValueError for a value that is out of range, or of another type."""
  for name, least in (
    ('repetition_penalty', 0.0),
    ('presence_penalty', -math.inf),
    ('frequency_penalty', -math.inf),
  ):
    value = getattr(way, name)
    if value is not None and not (
      _is_number(value) and least < value < math.inf
    ):
      raise ValueError(
        f'{name} should be a finite number above {least:g}, got {value!r}'
      )
  for name in ('no_repeat_ngram_size', 'min_new_tokens', 'min_length'):
    value = getattr(way, name)
    if value is not None and not _is_id(value):
      raise ValueError(f'{name} should be an integer from 0 on, got {value!r}')
  for name in ('suppress_tokens', 'begin_suppress_tokens'):
    value = getattr(way, name)
    if value is not None and not _are_ids(value):
      raise ValueError(f'{name} should be a list of token ids, got {value!r}')
  words = way.bad_words_ids
  if words is not None and not (
    isinstance(words, list | tuple) and all(x and _are_ids(x) for x in words)
  ):
    raise ValueError(
      f'bad_words_ids should be lists of token ids, got {words!r}'
    )
  bias = way.logit_bias
  if bias is not None and not (
    isinstance(bias, Mapping)
    and all(_is_id(_id_of(x)) for x in bias)
    and all(_is_number(x) and x < math.inf for x in bias.values())
  ):
    raise ValueError(
      'logit_bias should be numbers below infinity by token id, such as '
      f'{{5: -2.5}}, got {bias!r}'
    )


def check_names(given: Iterable[str]) -> None:
  """Raises ValueError for a name that is no field of `Processing`."""
  for name in given:
    if name not in NAMES:
      raise ValueError(
        f'no setting is called {name!r}; beside those of every text there are '
        f'{", ".join(NAMES)}{did_you_mean(name, NAMES)}'
      )


def is_used(way: Processing) -> bool:
  """Whether a way changes any logits."""
  values = ((getattr(way, name), _NEUTRAL.get(name)) for name in NAMES)
  return any(value and value != neutral for value, neutral in values)


def of_rows(
  ways: Sequence[Processing],
  lengths: Any,
  *,
  eos_ids: Sequence[int],
  vocab_size: int,
  among: Sequence[Processing] | None = None,
) -> base.Processors | None:
  """What changes the logits of each row of a batch, as data.

  Args:
    ways: of the rows; rows beyond these are nobody's.
    lengths: int32 `[B]`, of the prompts.
    eos_ids: what ends a text.
    vocab_size: of the model.
    among: the ways of all batches, which have one shape; None: of this one.

  Returns:
    None if none of them changes anything.

  Raises:
    ValueError: if an id is not of the model, or none is left.
  """
  among = ways if among is None else among
  if not any(is_used(way) for way in among):
    return None
  most, longest = 0, 1
  for way in {id(way): way for way in among}.values():
    biases = list(_biases(way, eos_ids))
    _check_ids(biases, vocab_size)
    most = max(most, len(biases))
    longest = max([longest, *(len(bias.sequence) for bias in biases)])
  # A few sizes, so that programs are compiled for few.
  num_biases = most and 2 ** (most - 1).bit_length()
  width = 2 ** (longest - 1).bit_length()
  num_rows = lengths.shape[0]
  sequences: Any = np.full(
    (num_rows, num_biases, width), processors.ANY, np.int32
  )
  values: Any = np.zeros((num_rows, num_biases), np.float32)
  until, is_whole = np.zeros((2, num_rows, num_biases), np.int32)
  for row, way in enumerate(ways):
    for i, bias in enumerate(_biases(way, eos_ids)):
      sequences[row, i, width - len(bias.sequence) :] = bias.sequence
      values[row, i], until[row, i] = bias.value, bias.until
      is_whole[row, i] = bias.is_whole

  def column(name: str, kind: type, neutral: float) -> Any:
    given = [getattr(way, name) for way in ways]
    given += [None] * (num_rows - len(ways))
    return np.array([neutral if x is None else x for x in given], kind)

  return base.Processors(
    repetition=column('repetition_penalty', np.float32, 1),
    presence=column('presence_penalty', np.float32, 0),
    frequency=column('frequency_penalty', np.float32, 0),
    ngram_size=column('no_repeat_ngram_size', np.int32, 0),
    sequences=sequences,
    biases=values,
    until=until - is_whole * lengths[:, None],
  )


def _biases(way: Processing, eos_ids: Sequence[int]) -> Iterator[_Bias]:
  for token, value in (way.logit_bias or {}).items():
    yield _Bias((_id_of(token),), value)
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


def _check_ids(biases: Sequence[_Bias], vocab_size: int) -> None:
  for bias in biases:
    if max(bias.sequence) >= vocab_size:
      raise ValueError(
        f'token {max(bias.sequence)} is none of the model, whose ids end at '
        f'{vocab_size - 1}'
      )
  never = {
    bias.sequence
    for bias in biases
    if len(bias.sequence) == 1 and bias.value == -math.inf
  }
  if len(never) == vocab_size:
    raise ValueError('every token is suppressed: leave some of them')


def _is_number(value: Any) -> bool:
  return isinstance(value, numbers.Real) and not isinstance(value, bool)


def _is_id(value: Any) -> bool:
  return type(value) is int and 0 <= value <= _MOST


def _are_ids(values: Any) -> bool:
  return isinstance(values, list | tuple) and all(map(_is_id, values))


def _id_of(key: Any) -> Any:
  """A token id; JSON has them as texts."""
  return int(key) if isinstance(key, str) and key.isdecimal() else key
