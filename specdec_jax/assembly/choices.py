"""What every entry point has of sampling, and the errors of choices."""

import contextlib
import dataclasses
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from specdec_jax import logits
from specdec_jax.base import LogitsToProbsFn

# Flags that are called otherwise than the field of a choice.
_FLAGS = {'rule': 'verification', 'text': 'ngram_text'}


class ChoiceError(ValueError):
  """Choices that contradict each other.

  `{name}` in the text stands for a choice by its name in Python and gin files;
  `named_by_flags` shows those of other entry points.
  """

  flag: str | None = None

  def __str__(self) -> str:
    def shown(found: re.Match) -> str:
      name = found[1]
      return self.flag.format(_FLAGS.get(name, name)) if self.flag else name

    return re.sub(r'\{(\w+)\}', shown, super().__str__())


@contextlib.contextmanager
def named_by_flags(flag: str) -> Iterator[None]:
  """Has choices complain in terms of flags, in a form such as `--{}`."""
  try:
    yield
  except ChoiceError as error:
    error.flag = flag
    raise


def option(
  default: Any,
  help: str,
  *,
  flag: str | None = None,
  type: Callable[[str], Any] | None = None,
) -> Any:
  """A field that is also a flag of the command line, by another name if `flag`
  says so; `type` is from the flag's text to a value, None for the default's."""
  metadata = {'help': help, 'flag': flag, 'type': type}
  return dataclasses.field(default=default, metadata=metadata)


def field_names(choice: type) -> list[str]:
  """The names of a choice's parameters in Python."""
  return [field.name for field in dataclasses.fields(choice)]


def flags_of(choice: type) -> Mapping[str, dataclasses.Field]:
  """The fields that are flags, by the names of their flags."""
  return {
    field.metadata['flag'] or field.name: field
    for field in dataclasses.fields(choice)
    if 'help' in field.metadata
  }


def switches_of(choice: type) -> list[str]:
  """The names in `flags_of` of flags that are on or off."""
  flags = flags_of(choice).items()
  return [name for name, field in flags if isinstance(field.default, bool)]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sampling:
  """How tokens are drawn (`logits.standardize`).

  Attributes:
    temperature: 0 is greedy.
    top_k: keeps the k likeliest tokens.
    top_p: keeps the likeliest with this much mass.
    min_p: keeps tokens with at least this share of the likeliest's probability.
  """

  temperature: float = 0.0
  top_k: int | None = None
  top_p: float | None = None
  min_p: float | None = None

  def __post_init__(self):
    for name, value in vars(self).items():
      if isinstance(value, str):
        raise ChoiceError(f'{{{name}}} must be a number, got {value!r}')
    self.to_probs(1)  # Raises where a value is out of range.

  @property
  def is_greedy(self) -> bool:
    return not self.temperature

  def to_probs(self, vocab_size: int) -> LogitsToProbsFn:
    """From logits to probabilities, of ids below `vocab_size`."""
    return logits.standardize(**vars(self), vocab_size=vocab_size)

  def check_is_used(self) -> None:
    """Raises ChoiceError for a limit that changes nothing at temperature 0."""
    for name in ('top_k', 'top_p', 'min_p'):
      value = getattr(self, name)
      if self.is_greedy and value is not None:
        raise ChoiceError(
          f'{{{name}}} {value:g} changes nothing at {{temperature}} 0, which '
          'is greedy: give a {temperature} above 0, or leave it out'
        )


def chosen(
  kind: str,
  known: Mapping[str, type],
  name: str,
  given: Mapping[str, Any],
  **fixed: Any,
) -> Any:
  """A choice by its name, of the options that are given.

  Args:
    kind: what an entry point calls it, such as 'drafter'.
    known: choices by name, `name` one of them.
    given: by the names of flags, None where nothing is said; others ignored.
    **fixed: fields that are settled otherwise.

  Raises:
    ValueError: if there is no such choice.
    ChoiceError: if an option of another one is given.
  """
  own = flags_of(by_name(kind, known, name))
  owners: dict[str, list[str]] = {}
  for other, choice in known.items():
    for flag, field in flags_of(choice).items():
      if given.get(flag) not in (None, field.default):
        owners.setdefault(flag, []).append(other)
  for flag, others in owners.items():
    if flag not in (*own, 'gamma'):  # Everybody may say how much is drafted.
      raise ChoiceError(
        f'{{{flag}}} is for {{{kind}}} {" or ".join(others)}, not {name}'
      )
  values = {
    field.name: given[flag]
    for flag, field in own.items()
    if given.get(flag) is not None
  }
  return known[name](**(values | fixed))


def by_name(kind: str, known: Mapping[str, Callable], name: str) -> Any:
  """A choice by its name; ValueError with all names if none is so called."""
  if name not in known:
    raise ValueError(f'{kind} {name!r} is none of {", ".join(known)}')
  return known[name]
