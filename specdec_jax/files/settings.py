"""Configurations that files state, read key by key as the types they have."""

import dataclasses
import functools
import json
import reprlib
import sys
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import numpy as np

MAX_COUNT = 2**31 - 1
# No trained network has more; loops over more could take forever.
MAX_LAYERS = 1000
# Limits of fields that decide how long a loop or a table is.
MOST = {
  'num_layers': MAX_LAYERS,
  'num_encoder_layers': MAX_LAYERS,
  'num_decoder_layers': MAX_LAYERS,
  'relpos_max_distance': 2**20,
}

# A JSON object.
Json = dict[str, Any]
_Built = TypeVar('_Built')
_IsRight = Callable[[Any], bool]

_short = reprlib.Repr()
_short.maxstring = _short.maxother = 60


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings:
  """The values of a configuration by key.

  Each method reads one key as one type. A value of another type is a ValueError
  that names the file, the key and the value. A key that is absent, or null, has
  the default; without one, it is a ValueError, too.

  Attributes:
    path: of the file.
    values: what it states.
    section: where in the file, such as `rope_scaling.`; empty at its top.
    asked: keys that were read so far, with their sections.
  """

  path: str
  values: Mapping[str, Any]
  section: str = ''
  asked: set[str] = dataclasses.field(default_factory=set, repr=False)

  def refuse(self, key: str, expected: str) -> NoReturn:
    """Raises the ValueError for the value of a key."""
    name, value = f'{self.section}{key}', self.values.get(key)
    if value is None:
      raise ValueError(f'{self.path} has no {name}: expected {expected}')
    if isinstance(value, np.ndarray):  # As a GGUF file has numbers.
      value = np.ravel(value)[: _short.maxlist + 1].tolist()
    shown = _short.repr(value)
    raise ValueError(f'{self.path}: {name} is {shown}, expected {expected}')

  def refuse_others(self, without_effect: Collection[str]) -> None:
    """Raises ValueError for a key, of any section, that was never read and is
    not one of `without_effect`: it may describe what is not computed."""
    for key, value in self.values.items():
      name = f'{self.section}{key}'
      if value is None or key in without_effect:
        continue
      if name not in self.asked:
        raise ValueError(
          f'{self.path}: {name} is {_short.repr(value)}, a key that is not '
          'known here; remove it if it changes nothing that is computed'
        )
      if isinstance(value, dict):
        self.at(key).refuse_others(without_effect)

  def has(self, key: str) -> bool:
    """Tells whether a key is there, and not null."""
    return self.values.get(key) is not None

  def count(
    self,
    key: str,
    default: int | None = None,
    *,
    least: int = 1,
    most: int = MAX_COUNT,
  ) -> int:
    """Returns an integer from `least` to `most`."""
    return self._read(
      key,
      default,
      lambda value: type(value) is int and least <= value <= most,
      f'an integer from {least} to {most}',
    )

  def number(self, key: str, default: float | None = None) -> float:
    """Returns a finite number."""
    return float(self._read(key, default, _is_finite, 'a number'))

  def positive(self, key: str, default: float | None = None) -> float:
    """Returns a finite number above 0."""
    is_right: _IsRight = lambda value: _is_finite(value) and value > 0
    return float(self._read(key, default, is_right, 'a number above 0'))

  def numbers(
    self, key: str, default: list[float] | None = None
  ) -> list[float]:
    """Returns a list of finite numbers."""
    return self._read(key, default, _all(_is_finite), 'a list of numbers')

  def flag(self, key: str, default: bool | None = None) -> bool:
    """Reads true or false, not a string such as 'true'."""
    return self._read(key, default, lambda v: type(v) is bool, 'true or false')

  def text(self, key: str, default: str | None = None) -> str:
    """Returns a string."""
    return self._read(key, default, _is_text, 'a string')

  def texts(self, key: str, default: list[str] | None = None) -> list[str]:
    """Returns a list of strings."""
    return self._read(key, default, _all(_is_text), 'a list of strings')

  def counts(self, key: str, default: list[int] | None = None) -> list[int]:
    """Returns a list of integers from 0 on."""
    is_right = _all(_is_id(MAX_COUNT))
    return self._read(key, default, is_right, 'a list of integers from 0 on')

  def ids(self, key: str, vocab_size: int | None = None) -> list[int]:
    """Reads token ids, a list or a single number; empty if absent."""
    most = MAX_COUNT if vocab_size is None else vocab_size - 1
    is_id = _is_id(most)
    value = self._read(
      key,
      [],
      lambda value: is_id(value) or _all(is_id)(value),
      f'token ids from 0 to {most}',
    )
    return value if isinstance(value, list) else [value]

  def expect(self, key: str, expected: float | str, why: str = '') -> None:
    """Raises ValueError unless a key has this value, or is absent; `why` goes
    on with the sentence."""
    readers: dict[type, Callable[..., object]] = {
      bool: self.flag,
      int: functools.partial(self.count, least=0),
      float: self.number,
      str: self.text,
    }
    if readers[type(expected)](key, expected) != expected:
      shown = f'{expected:g}' if type(expected) is float else str(expected)
      shown = shown.lower() if type(expected) is bool else shown
      self.refuse(key, f'{shown}{why}')

  def at(self, key: str) -> 'Settings':
    """Returns the object at a key, read likewise; empty if absent."""
    # Both share one set of keys that were read, by their full names.
    value = self._read(key, {}, lambda v: isinstance(v, dict), 'an object')
    section = f'{self.section}{key}.'
    return dataclasses.replace(self, values=value, section=section)

  def build(self, make: Callable[..., _Built], **fields: object) -> _Built:
    """Calls `make(**fields)`, and names the file in any ValueError."""
    try:
      return make(**fields)
    except (TypeError, ValueError) as error:  # An unknown field, a bad value.
      raise ValueError(f'{self.path}: {error}') from error

  def _read(
    self, key: str, default: Any, is_right: _IsRight, expected: str
  ) -> Any:
    # `refuse_others` refuses keys that were never read.
    self.asked.add(f'{self.section}{key}')
    value = self.values.get(key)
    # A default is checked as well: it may derive from other keys. A head's size
    # does, and is 0 if there are more heads than numbers.
    value = default if value is None else value
    if value is None or not is_right(value):
      self.refuse(key, expected)
    return value


def _is_text(value: object) -> bool:
  return isinstance(value, str)


def _is_id(most: int) -> _IsRight:
  return lambda value: type(value) is int and 0 <= value <= most


def _all(is_right: _IsRight) -> _IsRight:
  return lambda value: isinstance(value, list) and all(map(is_right, value))


def _is_finite(value: object) -> bool:
  # JSON's true is an int to Python, NaN a float, and integers have no largest.
  if not isinstance(value, int | float) or isinstance(value, bool):
    return False
  return abs(value) <= sys.float_info.max


def read(path: Path) -> Settings:
  """Returns the JSON object in a file; raises ValueError if there is none."""
  try:
    values = json.loads(path.read_text(encoding='utf-8'))
  except OSError as error:
    raise ValueError(f'cannot read {path}: {error.strerror}') from error
  except (ValueError, RecursionError) as error:
    raise ValueError(f'{path} is no JSON: {error}') from error
  if not isinstance(values, dict):
    raise ValueError(f'{path} holds no JSON object')
  return Settings(path=str(path), values=values)


def read_if_any(path: Path) -> Settings:
  """Reads the JSON object in a file; an empty one if there is no such file."""
  return read(path) if path.is_file() else Settings(path=str(path), values={})
