"""What differs between two records, in words."""

import difflib
from collections.abc import Iterator
from typing import Any

# Lines of a program's difference, and characters of a value, that are shown.
_MOST_LINES, _MOST_CHARACTERS = 40, 160


def of_values(before: Any, after: Any, place: str = '') -> Iterator[str]:
  """Yields a sentence for each value that differs, with its place."""
  if isinstance(before, dict) and isinstance(after, dict):
    for key in [*before, *(key for key in after if key not in before)]:
      inner = f'{place}/{key}'
      if key not in after:
        yield f'{inner}: is gone'
      elif key not in before:
        yield f'{inner}: is new'
      else:
        yield from of_values(before[key], after[key], inner)
  elif isinstance(before, list) and isinstance(after, list):
    if len(before) != len(after):
      yield f'{place}: {len(before)} values before, {len(after)} after'
    for i, (one, other) in enumerate(zip(before, after, strict=False)):
      yield from of_values(one, other, f'{place}[{i}]')
  elif before != after:
    yield f'{place}: {_shown(before)} before, {_shown(after)} after'


def of_names(before: dict, after: dict, place: str = '') -> Iterator[str]:
  """Yields a sentence for each name, in lists in dictionaries, that only one of
  both has."""
  for key in [*before, *(key for key in after if key not in before)]:
    one, other = before.get(key, {}), after.get(key, {})
    inner = f'{place}/{key}'
    if isinstance(one, dict) and isinstance(other, dict):
      yield from of_names(one, other, inner)
      continue
    for name in sorted({*one} - {*other}):
      yield f'{inner}: {name} is gone'
    for name in sorted({*other} - {*one}):
      yield f'{inner}: {name} is new'


def _shown(value: Any) -> str:
  text = repr(value)
  is_long = len(text) > _MOST_CHARACTERS
  return f'{text[:_MOST_CHARACTERS]}...' if is_long else text


def of_programs(before: dict, after: dict) -> Iterator[str]:
  """Yields a sentence for each loop whose programs differ, with the first lines
  of the difference."""
  for loop in [*before, *(name for name in after if name not in before)]:
    texts = [
      {module['sha256']: module['text'] for module in modules.get(loop, ())}
      for modules in (before, after)
    ]
    gone = [text for digest, text in texts[0].items() if digest not in texts[1]]
    new = [text for digest, text in texts[1].items() if digest not in texts[0]]
    if not gone and not new:
      continue
    yield (
      f'/programs/{loop}: {len(gone)} of {len(texts[0])} programs are gone, '
      f'{len(new)} are new'
    )
    for one, other in zip(gone, new, strict=False):
      lines = difflib.unified_diff(
        one.splitlines(),
        other.splitlines(),
        'before',
        'after',
        lineterm='',
        n=1,
      )
      shown = [line for line, _ in zip(lines, range(_MOST_LINES), strict=False)]
      yield '\n'.join(shown)


def of_records(before: dict, after: dict) -> Iterator[str]:
  """Yields what differs in the sections of the later record."""
  for section, recorded in after['sections'].items():
    expected = before['sections'].get(section)
    if expected is None:
      yield f'/{section}: is not in the record to compare with'
    elif section == 'programs':
      yield from of_programs(expected, recorded)
    elif section == 'names':
      yield from of_names(expected, recorded, f'/{section}')
    else:
      yield from of_values(expected, recorded, f'/{section}')
