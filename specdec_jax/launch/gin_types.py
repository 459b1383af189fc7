"""Checks the types of gin bindings by the annotations of parameters."""

import ast
import collections.abc
import inspect
import types
import typing
from collections.abc import Callable, Mapping
from typing import Any


def check(
  bindings: Mapping[str, str], find: Callable[[str], Callable[..., Any]]
) -> None:
  """Raises ValueError for a binding with a value of a wrong type.

  Args:
    bindings: of `gin_launch.bindings`; None and references are not checked.
    find: from the name of a function to the function.
  """
  for name, text in bindings.items():
    function, _, argument = name.rpartition('/')[2].rpartition('.')
    if not function:
      continue  # A macro is checked where it is used.
    # `f.x = %A` and `A = 3` make the value 3, and A the name in the message.
    passed = [name]
    while text.startswith('%') and (macro := text[1:]) in bindings:
      if macro in passed:
        raise ValueError(f'gin: macro {macro} is defined by itself')
      name, text = macro, bindings[macro]
      passed.append(name)
    try:
      value = ast.literal_eval(text)
    except (ValueError, SyntaxError):
      continue
    parameter = inspect.signature(find(function)).parameters.get(argument)
    # None leaves a value open.
    if value is None or parameter is None:
      continue
    if not fits(value, parameter.annotation):
      expected = written(parameter.annotation)
      raise ValueError(f'gin: {name} is {value!r}, expected {expected}')


def written(annotation: object) -> str:
  """Returns a type as written in code, such as `Sequence[str]`."""
  return inspect.formatannotation(annotation).replace('collections.abc.', '')


def fits(value: object, annotation: object) -> bool:
  """Returns whether a plain value is of a type; True if it cannot be known."""
  origin, args = typing.get_origin(annotation), typing.get_args(annotation)
  if origin in (types.UnionType, typing.Union):
    return any(fits(value, member) for member in args)
  if annotation is float:  # Not bool, which is an int.
    return type(value) in (int, float)
  if annotation in (bool, int, str, types.NoneType):
    return type(value) is annotation
  all_fit = lambda items, item_annotation: all(
    fits(item, item_annotation) for item in items
  )
  if origin is collections.abc.Sequence:
    return isinstance(value, list | tuple) and all_fit(value, args[0])
  if origin is collections.abc.Mapping:
    return isinstance(value, dict) and (
      all_fit(value, args[0]) and all_fit(value.values(), args[1])
    )
  return origin is not collections.abc.Callable
