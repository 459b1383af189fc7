"""Types of options that are numbers, or other plain values."""

import argparse
import ast
import json
from collections.abc import Callable
from typing import Any


def number(
  value_type: Callable, is_valid: Callable, expected: str
) -> Callable[[str], float]:
  """Returns an argparse type that checks numbers; errors say what is
  `expected`."""

  def parse(text: str):
    try:
      value = value_type(text)
    except ValueError:
      value = None
    if value is None or not is_valid(value):
      raise argparse.ArgumentTypeError(f'must be {expected}, got {text}')
    return value

  return parse


def literal(expected: str) -> Callable[[str], Any]:
  """Returns an argparse type for Python literals."""

  def parse(text: str) -> Any:
    try:
      return ast.literal_eval(text)
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
      raise argparse.ArgumentTypeError(
        f'must be {expected}, got {text}'
      ) from None

  return parse


def json_object(text: str) -> dict[str, Any]:
  """Parses an object of JSON, as an argparse type."""
  try:
    value = json.loads(text)
  except (ValueError, RecursionError):
    value = None
  if not isinstance(value, dict):
    raise argparse.ArgumentTypeError(f'must be an object of JSON, got {text}')
  return value


count = number(int, lambda n: n >= 0, 'an integer of at least 0')
positive_int = number(int, lambda n: n >= 1, 'an integer of at least 1')
cost = number(float, lambda x: 0 <= x < float('inf'), 'a number of at least 0')
share = number(float, lambda x: 0 <= x <= 1, 'a number in [0, 1]')
fraction = number(float, lambda x: 0 < x <= 1, 'a number in (0, 1]')
