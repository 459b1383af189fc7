"""Dataclass fields that are options of a user: a flag of the command line, a
keyword argument of `specdec_jax.load`, and a gin parameter, all of one name."""

import dataclasses
import os
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from specdec_jax.launch import gin_types
from specdec_jax.launch.spelling import did_you_mean

Row = TypeVar('Row')
Choice = TypeVar('Choice')


def option(
  default: Any, help: str, *, type: Callable[[str], Any] | None = None
) -> Any:
  """Makes a dataclass field that is also a flag; `type` converts the flag's
  text to a value, None to the type of the default."""
  # A field without this metadata can be given in Python and gin alone.
  metadata = {'help': help, 'type': type}
  return dataclasses.field(default=default, metadata=metadata)


def field_names(choice: Any) -> list[str]:
  """Lists the parameters of a choice in Python, those without a flag too."""
  return [field.name for field in dataclasses.fields(choice)]


def options_of(choice: type) -> dict[str, dataclasses.Field]:
  """Returns the fields that `option` made, by name."""
  fields = dataclasses.fields(choice)
  return {field.name: field for field in fields if 'help' in field.metadata}


def plain(value: Any) -> Any:
  """Converts numbers, lists and dicts, also of numpy or jax, to Python's, and
  paths to texts; other values stay."""
  value = value.tolist() if hasattr(value, 'tolist') else value
  value = os.fspath(value) if isinstance(value, os.PathLike) else value
  if isinstance(value, Mapping):
    # A sequence of ids that is a key stays one.
    key = lambda x: tuple(map(plain, x)) if isinstance(x, tuple) else plain(x)
    return {key(name): plain(x) for name, x in value.items()}
  # A named tuple, such as a `Schedule`, is no list.
  is_list = type(value) in (list, tuple, range)
  return [*map(plain, value)] if is_list else value


def hashable(choice: Choice) -> Choice:
  """Returns a choice, a frozen dataclass, with tuples in place of lists."""
  fields = dataclasses.fields(choice)  # type: ignore[arg-type]
  values = {field.name: getattr(choice, field.name) for field in fields}
  lists = {name: x for name, x in values.items() if isinstance(x, list)}
  if not lists:
    return choice
  tuples = {name: _tuples(value) for name, value in lists.items()}
  return dataclasses.replace(choice, **tuples)  # type: ignore[type-var]


def _tuples(value: Any) -> Any:
  return tuple(map(_tuples, value)) if isinstance(value, list) else value


def check_types(choice: Any, values: Mapping[str, object]) -> None:
  """Raises ValueError for values by parameter that are of another type."""
  for field in dataclasses.fields(choice):
    value = values.get(field.name)
    if value is not None and not gin_types.fits(value, field.type):
      expected = gin_types.written(field.type)
      raise ValueError(f'{field.name} is {value!r}, expected {expected}')


def chosen(
  title: str,
  table: Mapping[str, type[Choice]],
  name: str,
  options: Mapping[str, Any],
) -> Choice:
  """Makes the choice of a name from options by field; None: not given.

  `title` is what errors call the choices of the table, such as 'drafter'. Keys
  that are no field of any choice are ignored. ValueError if there is no such
  choice, a value is of another type, a field of other choices is given, or a
  draft model is needed.
  """
  choice = by_name(title, table, name)
  values = {key: x for key, x in options.items() if x is not None}
  check_types(choice, values)
  for key in values:
    owners = [owner for owner in table if key in field_names(table[owner])]
    if owners and name not in owners:
      shown = 'a draft model' if key == 'model' else key
      raise ValueError(
        f'{shown} is for {title} {" or ".join(owners)}, not {name}'
      )
  names = field_names(choice)
  if 'model' in names and 'model' not in values:
    raise ValueError(f'{title} {name} needs a draft model')
  return choice(**{key: values[key] for key in names if key in values})


def by_name(title: str, table: Mapping[str, Row], name: str) -> Row:
  """Looks up a row of a table; ValueError with all names if there is none."""
  if name not in table:
    hint = did_you_mean(name, table)
    raise ValueError(f'{title} {name!r} is none of {", ".join(table)}{hint}')
  return table[name]
