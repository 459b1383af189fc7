"""The settings by which the tokens of a text are drawn: one table.

Each field of `TextSettings` is a flag, a keyword argument of `load` and
`generate`, a key of a line of prompts, and a gin parameter of `infer`, all of
one name. It is declared once, with its help, its check, the column of a batch
that carries it, and how a list of it nests. What else decodes texts has a
`TextSettings`: a decoder, a call (`running.DecodeSettings`), a row.
"""

import dataclasses
import math
import numbers
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from specdec_jax import base
from specdec_jax.assembly import grammar_texts
from specdec_jax.assembly.option_fields import plain
from specdec_jax.base import LogitsToProbsFn
from specdec_jax.launch.numbers import (
  count,
  json_object,
  literal,
  number,
  share,
)
from specdec_jax.launch.spelling import did_you_mean
from specdec_jax.sampling import logits

LARGEST_INT = 2**31 - 1
# Of float32: what is larger would be infinite.
_LARGEST_FLOAT = float(np.finfo(np.float32).max)


@dataclasses.dataclass(frozen=True)
class Column:
  """The array in which the rows of a batch have a setting.

  Attributes:
    struct: `base.Sampling` or `base.Processors`.
    name: its field.
    dtype: of the array.
    neutral: the value that changes nothing.
    off: a value by which users disable the setting, as in transformers and
      vLLM, if it is not the neutral one.
    largest: larger values mean the same as this.
  """

  struct: type
  name: str
  dtype: type
  neutral: float
  off: float | None = None
  largest: float = math.inf

  def packed(self, values: Iterable[float | None]) -> np.ndarray:
    """Makes the array of the values of rows, None for the neutral one."""
    filled = [
      self.neutral if value in (None, self.off) else min(value, self.largest)
      for value in values
    ]
    return np.array(filled, self.dtype)


def _setting(
  help: str,
  expected: str,
  is_valid: Callable[[Any], bool],
  *,
  parse: Callable[[str], Any] | None = None,
  column: Column | None = None,
  depth: int = 0,
) -> Any:
  """Declares a field of `TextSettings`.

  Args:
    help: of the flag.
    expected: what values are, for errors.
    is_valid: the check of a value.
    parse: from the text of the flag; None reads a Python literal.
    column: the array of a batch; None if there is more than one, or a grammar.
    depth: how many levels of lists a single value has; a list with one more is
      a list of one value for each text.
  """
  metadata = {
    'help': help,
    'type': parse or literal(expected),
    'expected': expected,
    'is_valid': is_valid,
    'column': column,
    'depth': depth,
  }
  return dataclasses.field(default=None, metadata=metadata)


def _may_be_number(value: object) -> bool:
  # A macro of gin is often a string by mistake, and `'0.5' < 1` would raise
  # TypeError.
  return not isinstance(value, str | bool | list | tuple | dict)


def _is_number(value: Any, least: float = -_LARGEST_FLOAT) -> bool:
  is_number = isinstance(value, numbers.Real) and not isinstance(value, bool)
  return is_number and least <= value <= _LARGEST_FLOAT


def _is_positive(value: Any) -> bool:
  return _is_number(value) and value > 0


def _is_id(value: object) -> bool:
  return type(value) is int and 0 <= value <= LARGEST_INT


def _are_ids(values: object) -> bool:
  return isinstance(values, list | tuple) and all(map(_is_id, values))


def _are_sequences(values: Any) -> bool:
  is_list = isinstance(values, list | tuple)
  return is_list and all(ids and _are_ids(ids) for ids in values)


def _are_pairs(values: Any) -> bool:
  return _are_sequences(values) and all(len(pair) == 2 for pair in values)


def _are_biases(biases: object) -> bool:
  return isinstance(biases, Mapping | list | tuple) and all(
    isinstance(pair, list | tuple)
    and len(pair) == 2
    and _are_sequences(pair[:1])
    and _is_number(pair[1], -math.inf)
    for pair in bias_pairs(biases)
  )


def bias_pairs(biases: Any) -> Iterable[Any]:
  """Returns sequences and their biases, from a list as JSON has it, or from a
  mapping, in which a single id stands for itself, in JSON as a string."""
  if not isinstance(biases, Mapping):
    return biases or ()
  key = lambda x: int(x) if isinstance(x, str) and x.isdecimal() else x
  return [
    (x if isinstance(x, tuple) else (key(x),), bias)
    for x, bias in biases.items()
  ]


_is_text = lambda value: isinstance(value, str) and bool(value)
_is_any = lambda value: True

# Types of flags.
temperature = number(
  float,
  lambda x: x == 0 or logits.MIN_TEMPERATURE <= x < float('inf'),
  f'0, which is greedy, or a number of at least {logits.MIN_TEMPERATURE:g}',
)
_mass = number(float, lambda x: 0 < x <= 1, 'a number in (0, 1]; 1 keeps all')

# What several settings expect, with its check.
_DRAWN = 'a number', _may_be_number
_ABOVE_0 = 'a finite number above 0', _is_positive
_NUMBER = 'a finite number', _is_number
_COUNT = 'an integer from 0 on', _is_id
_IDS = "a list of token ids, such as '[5, 7]'", _are_ids


def _drawn(name: str, dtype: type, neutral: float, **limits: float) -> Column:
  return Column(base.Sampling, name, dtype, neutral, **limits)


def _processed(name: str, dtype: type, neutral: float) -> Column:
  return Column(base.Processors, name, dtype, neutral)


@dataclasses.dataclass(frozen=True, kw_only=True)
class TextSettings:
  """How the tokens of a text are drawn; None: not given.

  What is not given is that of other settings, see `over`, and in the end what
  changes nothing: greedy decoding without limits and processors. For what
  settings do, see `sampling.logits.standardize` for the first five,
  `text.grammars` for the next four, and `sampling.processors`. ValueError for a
  value of another type or out of range, and for settings that contradict each
  other.
  """

  # From logits to probabilities.
  temperature: float | None = _setting(
    '0 is greedy',
    *_DRAWN,
    parse=temperature,
    column=_drawn('temperature', np.float32, 0, largest=LARGEST_INT),
  )
  top_k: int | None = _setting(
    'keep the k likeliest; 0 keeps all',
    *_DRAWN,
    parse=count,
    column=_drawn('top_k', np.int32, LARGEST_INT, off=0, largest=LARGEST_INT),
  )
  top_p: float | None = _setting(
    'keep the likeliest with this much mass; 1 keeps all',
    *_DRAWN,
    parse=_mass,
    column=_drawn('top_p', np.float32, 1),
  )
  min_p: float | None = _setting(
    "keep those with at least this share of the likeliest's probability",
    *_DRAWN,
    parse=share,
    column=_drawn('min_p', np.float32, 0),
  )
  typical_p: float | None = _setting(
    'keep those with this much mass whose surprise is nearest the entropy',
    *_DRAWN,
    parse=_mass,
    column=_drawn('typical_p', np.float32, 1),
  )

  # A grammar: at most one of the three.
  regex: str | None = _setting(
    'give only texts that this matches as a whole',
    'a regular expression',
    _is_text,
    parse=str,
  )
  json_schema: Mapping[str, object] | str | None = _setting(
    'give only JSON of this schema, which is a file or a text',
    'a schema',
    _is_any,
    parse=str,
  )
  grammar: str | None = _setting(
    "give only texts of this grammar, in llguidance's form of Lark, which is a "
    'file or a text',
    'a grammar as text',
    _is_text,
    parse=str,
  )
  grammar_limits: Mapping[str, int] | None = _setting(
    "limits of a grammar's size and time, by llguidance's names, as JSON such "
    'as \'{"step_max_items": 10000}\'',
    'limits by name',
    _is_any,
    parse=json_object,
  )

  # Processors, which change logits by the text so far.
  repetition_penalty: float | None = _setting(
    'divide positive logits of ids in the text, prompt included, by this, and '
    'multiply negative ones',
    *_ABOVE_0,
    column=_processed('repetition', np.float32, 1),
  )
  presence_penalty: float | None = _setting(
    'subtract this from logits of ids that were generated',
    *_NUMBER,
    column=_processed('presence', np.float32, 0),
  )
  frequency_penalty: float | None = _setting(
    'subtract this as often as an id was generated',
    *_NUMBER,
    column=_processed('frequency', np.float32, 0),
  )
  no_repeat_ngram_size: int | None = _setting(
    'forbid repeated n-grams of this size; 0 disables',
    *_COUNT,
    column=_processed('ngram_size', np.int32, 0),
  )
  encoder_repetition_penalty: float | None = _setting(
    'the reverse, for ids that the encoder read, or else the prompt has: '
    'multiply positive logits by this',
    *_ABOVE_0,
    column=_processed('encoder_repetition', np.float32, 1),
  )
  encoder_no_repeat_ngram_size: int | None = _setting(
    'forbid n-grams of this size of those ids; 0 disables',
    *_COUNT,
    column=_processed('encoder_ngram_size', np.int32, 0),
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
    lambda value: isinstance(value, Mapping) and _are_biases(value),
  )
  sequence_bias: Sequence[Any] | Mapping[Any, float] | None = _setting(
    "add to the logit of a sequence's last id, where the others stand before "
    'it',
    "sequences of ids, each with a number, such as '[[[5, 7], -2.5]]'",
    _are_biases,
    depth=3,
  )
  suppress_tokens: Sequence[int] | None = _setting(
    'never generate these ids', *_IDS, depth=1
  )
  begin_suppress_tokens: Sequence[int] | None = _setting(
    'begin with none of these ids', *_IDS, depth=1
  )
  bad_words_ids: Sequence[Sequence[int]] | None = _setting(
    'never generate these sequences of ids',
    "lists of token ids, such as '[[5], [7, 8]]'",
    _are_sequences,
    depth=2,
  )
  forced_bos_token_id: int | None = _setting(
    "give this id first, after a decoder's start alone", 'a token id', _is_id
  )
  forced_eos_token_id: int | Sequence[int] | None = _setting(
    'end with this id, or one of these, at the limit',
    "a token id, or some, such as '[5, 7]'",
    lambda value: _is_id(value) or _are_ids(value),
    depth=1,
  )
  forced_decoder_ids: Sequence[Sequence[int]] | None = _setting(
    'pairs of a position, from 0 and with the prompt, and the id that is there',
    "pairs of a position and an id, such as '[[1, 5]]'",
    _are_pairs,
    depth=2,
  )

  def __post_init__(self):
    for field in dataclasses.fields(TextSettings):
      value, expected = getattr(self, field.name), field.metadata['expected']
      if value is not None and not field.metadata['is_valid'](value):
        raise ValueError(f'{field.name} should be {expected}, got {value!r}')
    self.to_probs(1)  # Raises where a value is out of range.
    self.grammar_text()  # Raises if it cannot be read, or is none.
    for name in ('forced_bos_token_id', 'forced_eos_token_id'):
      forced = ids_of(getattr(self, name))
      if forced and set(forced) <= {*(self.suppress_tokens or ())}:
        raise ValueError(
          f'{name} forces {list(forced)}, which suppress_tokens rules out: '
          'take them out of one of the two'
        )

  def explicit(self) -> dict[str, Any]:
    """Returns the settings that are not None, by name."""
    values = {name: getattr(self, name) for name in NAMES}
    return {name: x for name, x in values.items() if x is not None}

  def over(self, usual: 'TextSettings') -> 'TextSettings':
    """Returns these settings, with those of `usual` where none is given.

    A greedy text takes no limits of `usual`, which are meant for texts that are
    drawn, and either name of the least length replaces both.
    """
    replaced: set[str] = set()
    if self.temperature == 0:
      replaced.update(LIMITS)
    if any(getattr(self, name) is not None for name in _LEAST):
      replaced.update(_LEAST)
    inherited = {
      name: x for name, x in usual.explicit().items() if name not in replaced
    }
    return TextSettings(**inherited | self.explicit())

  @property
  def is_greedy(self) -> bool:
    return not self.temperature

  @property
  def drawing(self) -> 'TextSettings':
    """What of it is compiled: the temperature and the limits."""
    limits = {name: getattr(self, name) for name in LIMITS}
    return TextSettings(temperature=self.temperature or 0.0, **limits)

  def to_probs(self, vocab_size: int) -> LogitsToProbsFn:
    """Makes the function from logits to probabilities of `vocab_size` ids."""
    return logits.standardize(
      temperature=self.temperature or 0.0,
      **{name: self.used(name) for name in LIMITS},
      vocab_size=vocab_size,
    )

  def used(self, name: str) -> Any:
    """Returns one of `LIMITS`; None if it is not given, or disabled."""
    value = getattr(self, name)
    return None if value == _OFF[name] else value

  def check_is_used(self) -> None:
    """Raises ValueError for a limit that changes nothing at temperature 0."""
    for name in LIMITS:
      value = self.used(name)
      if self.is_greedy and value is not None:
        raise ValueError(
          f'{name} {value:g} changes nothing at temperature 0: give a '
          'temperature above 0, or leave it out'
        )

  def check_has_room(self, name: str, most: int) -> None:
    """Raises ValueError if texts must be longer than a limit of this name."""
    if (least := self.min_new_tokens or 0) > most:
      raise ValueError(f'min_new_tokens {least} exceeds {name} {most}')

  @property
  def grammar_name(self) -> str | None:
    """The setting that states a grammar; ValueError if there are several."""
    names = [name for name in _GRAMMARS if getattr(self, name) is not None]
    if len(names) > 1:
      raise ValueError(f'{" and ".join(names)} exclude each other: give one')
    return names[0] if names else None

  def grammar_text(self) -> str | None:
    """Returns the text of the grammar, which may be in a file, if there is
    one."""
    match self.grammar_name:
      case 'json_schema':
        assert self.json_schema is not None
        return grammar_texts.of_schema(self.json_schema)
      case 'grammar':
        assert self.grammar is not None
        return grammar_texts.of_lark(self.grammar)
    return self.regex


_FIELDS = {field.name: field for field in dataclasses.fields(TextSettings)}
_GRAMMARS = ('regex', 'json_schema', 'grammar')
# Two names of one thing.
_LEAST = ('min_new_tokens', 'min_length')
NAMES = tuple(_FIELDS)


def columns_of(struct: type) -> dict[str, Column]:
  """Returns the columns of a structure of arrays, by setting."""
  columns = {name: field.metadata['column'] for name, field in _FIELDS.items()}
  return {
    name: column
    for name, column in columns.items()
    if column is not None and column.struct is struct
  }


# The settings that make probabilities of logits, and those of them that change
# nothing in greedy decoding.
DRAWN = tuple(columns_of(base.Sampling))
LIMITS = tuple(name for name in DRAWN if name != 'temperature')
# The values that disable limits.
_OFF = {
  name: column.neutral if column.off is None else column.off
  for name, column in columns_of(base.Sampling).items()
}


def depth(name: str) -> int:
  """Returns how many levels of lists a value of a setting has."""
  return _FIELDS[name].metadata['depth']


def ids_of(ids: int | Sequence[int] | None) -> Sequence[int]:
  """Returns ids that are given as one, several or none as a sequence."""
  if ids is None:
    return ()
  return (ids,) if isinstance(ids, int) else ids


def check_names(names: Iterable[str]) -> None:
  """Raises ValueError for a name that is no field of `TextSettings`."""
  for name in names:
    if name not in NAMES:
      raise ValueError(
        f'{name!r} is no setting of how texts are sampled; these are '
        f'{", ".join(NAMES)}{did_you_mean(name, NAMES)}'
      )


def taken(options: dict[str, Any], **fields: Any) -> TextSettings:
  """Makes settings of `fields` and of those that it takes out of `options`;
  raises as `TextSettings`."""
  fields |= {name: options.pop(name) for name in NAMES if name in options}
  return TextSettings(**plain(fields))
