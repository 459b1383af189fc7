"""JSON schemas as regular expressions: of texts without spaces, and with
properties in the schema's order. What would not be heeded is refused."""

import functools
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from specdec_jax.text import grammars

# An object of a schema that was read from JSON.
Schema = Mapping[str, Any]

_NOTES = {
  *('$schema', '$id', '$comment', '$defs', 'definitions', 'title'),
  *('description', 'default', 'examples', 'deprecated'),
}
_BY_TYPE = {
  'string': {'minLength', 'maxLength', 'pattern', 'format'},
  'integer': set(),
  'number': set(),
  'boolean': set(),
  'null': set(),
  'array': {'items', 'minItems', 'maxItems'},
  # No property comes that the schema does not name.
  'object': {'properties', 'required', 'additionalProperties'},
}
# What says by itself what may come; the type beside it only repeats it.
_ALONE = {'enum': {'type'}, 'const': {'type'}, 'anyOf': set(), '$ref': set()}
# Of years, 4 divides 2024 but not 2023, and 400 divides 2000 but not 1900.
_FOURS = '([02468][048]|[13579][26])'
_LEAP_YEAR = f'([0-9]{{2}}(0[48]|[2468][048]|[13579][26])|{_FOURS}00)'
_DATE = (
  '([0-9]{4}-((0[1-9]|1[0-2])-(0[1-9]|1[0-9]|2[0-8])|(0[13-9]|1[0-2])-(29|30)'
  f'|(0[13578]|1[02])-31)|{_LEAP_YEAR}-02-29)'
)
_HOUR = '([01][0-9]|2[0-3]):[0-5][0-9]'
_FORMATS = {
  'date': _DATE,
  'date-time': rf'{_DATE}T{_HOUR}:[0-5][0-9](\.[0-9]+)?(Z|[+-]{_HOUR})',
  'uuid': '[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}',
}
_CHARACTER = r'([^"\\\x00-\x1f\x7f-\x9f]|\\["\\/bfnrt])'
_INTEGER = '-?(0|[1-9][0-9]*)'
_NUMBER = rf'{_INTEGER}(\.[0-9]+)?([eE][+-]?[0-9]+)?'
# ECMA's `\d` and the like are of ASCII, Rust's of Unicode.
_CLASSES = {'d': '[0-9]', 'D': '[^0-9]'}
_CLASSES |= {'w': '[0-9A-Za-z_]', 'W': '[^0-9A-Za-z_]'}
# What a keyword's value should be.
_COUNT = 'from 0 to 65535', lambda x: type(x) is int and 0 <= x < 2**16
_LIST = 'a list of some values', lambda x: isinstance(x, list) and x
_VALUES = {
  'anyOf': _LIST,
  'enum': _LIST,
  'format': (f'one of {", ".join(_FORMATS)}', lambda x: x in [*_FORMATS]),
  'pattern': ('a text', lambda x: isinstance(x, str)),
  'properties': ('an object', lambda x: isinstance(x, Mapping) and x),
} | dict.fromkeys(('minLength', 'maxLength', 'minItems', 'maxItems'), _COUNT)


@functools.lru_cache(maxsize=64)
def to_regex(text: str) -> str:
  """The regular expression of a schema, itself JSON; ValueError, with the
  place, for what would not be heeded."""
  try:
    schema = json.loads(text, parse_constant=_refuse)
    return _of_part(schema, schema, '#')
  except RecursionError as error:
    raise ValueError('this JSON schema is nested too deeply') from error


def _refuse(constant: str) -> None:
  raise ValueError(f'JSON schema: {constant} is no number of JSON')


def _of_part(
  schema: Any, root: object, place: str, above: tuple[object, ...] = ()
) -> str:
  """The regular expression of a part of the schema `root`; `above` are the
  references that lead to it."""
  if complaint := _complaint(schema, root, above):
    raise ValueError(f'JSON schema, {place}: {complaint}')
  inner = lambda name, x: _of_part(x, root, f'{place}/{name}', above)
  if '$ref' in schema:
    ref = schema['$ref']
    return _of_part(_found(root, ref), root, ref, (*above, ref))
  if 'enum' in schema or 'const' in schema:
    return _any(map(_literal, _values(schema)))
  if 'anyOf' in schema:
    ways = enumerate(schema['anyOf'])
    return _any(inner(f'anyOf/{i}', each) for i, each in ways)
  texts = {
    'string': lambda: f'"{_string(schema)}"',
    'integer': lambda: _INTEGER,
    'number': lambda: _NUMBER,
    'boolean': lambda: 'true|false',
    'null': lambda: 'null',
    'array': lambda: _array(inner('items', schema['items']), schema),
    'object': lambda: _object(
      {k: inner(f'properties/{k}', x) for k, x in schema['properties'].items()},
      schema.get('required', ()),
    ),
  }
  return _any(texts[each]() for each in _types(schema))


def _values(schema: Schema) -> list[object]:
  return schema.get('enum', [schema.get('const')])


def _types(schema: Schema) -> list[Any]:
  types = schema.get('type')
  return types if isinstance(types, list) and types else [types]


def _types_of(value: object) -> set[str]:
  if isinstance(value, int | float) and not isinstance(value, bool):
    return {'number', *(['integer'] if value == value // 1 else [])}
  kinds = {str: 'string', bool: 'boolean', list: 'array', dict: 'object'}
  return {kinds.get(type(value), 'null')}


def _any(ways: Iterable[str]) -> str:
  return f'({"|".join(ways)})'


def _literal(value: object) -> str:
  text = json.dumps(value, ensure_ascii=False, separators=(',', ':'))
  return re.escape(text)


def _string(schema: Schema) -> str:
  if 'format' in schema:
    return _FORMATS[schema['format']]
  if 'pattern' in schema:
    return f'({_whole(schema["pattern"])})'
  least, most = _limits(schema, 'Length')
  return f'{_CHARACTER}{{{least},{"" if most is None else most}}}'


def _array(item: str, schema: Schema) -> str:
  least, most = _limits(schema, 'Items')
  if most == 0:
    return r'\[\]'
  others = f'{max(least - 1, 0)},{"" if most is None else most - 1}'
  some = f'({item}(,{item}){{{others}}})'
  return rf'\[{some}{"" if least else "?"}\]'


def _object(properties: Mapping[str, str], required: Sequence[str]) -> str:
  members = [f'{_literal(name)}:{x}' for name, x in properties.items()]
  before = lambda i: ''.join(f'({each},)?' for each in members[:i])
  due = [i for i, name in enumerate(properties) if name in required]
  if not due:  # Each of them may be the last.
    some = _any(before(i) + each for i, each in enumerate(members))
    return rf'\{{{some}?\}}'
  others = ''.join(
    f',{members[i]}' if i in due else f'(,{members[i]})?'
    for i in range(due[0] + 1, len(members))
  )
  return rf'\{{{before(due[0])}{members[due[0]]}{others}\}}'


def _limits(schema: Schema, what: str) -> tuple[int, int | None]:
  return schema.get(f'min{what}', 0), schema.get(f'max{what}')


def _whole(pattern: str) -> str:
  """A pattern in Rust's syntax, where brackets may be within brackets, and
  without its anchors: it is matched as a whole anyway."""
  is_anchored = pattern.endswith('$') and not pattern.endswith(r'\$')
  bare = pattern.removeprefix('^')[: -1 if is_anchored else None]
  return re.sub(r'\\(.)', lambda x: _CLASSES.get(x[1], x[0]), bare)


def _found(root: object, ref: object) -> Any:
  """What a reference such as `#/$defs/name` names, None if nothing."""
  first, *names = ref.split('/') if isinstance(ref, str) else ['']
  for name in names:
    name = name.replace('~1', '/').replace('~0', '~')
    root = root.get(name) if isinstance(root, Mapping) else None
  return root if first == '#' else None


def _complaint(
  schema: Any, root: object, above: tuple[object, ...]
) -> str | None:
  """Says what of a part would not be heeded; None if it all is."""
  if not isinstance(schema, Mapping):
    return 'it should be an object'
  kind = next((name for name in _ALONE if name in schema), None)
  if kind is not None:
    known = {kind} | _ALONE[kind]
  else:
    types = _types(schema)
    if unknown := [each for each in types if each not in [*_BY_TYPE]]:
      return f'type should be one of {", ".join(_BY_TYPE)}, got {unknown[0]!r}'
    known = {'type'}.union(*(_BY_TYPE[each] for each in types))
    for each, needed in (('object', 'properties'), ('array', 'items')):
      if each in types and needed not in schema:
        return f'an {each} needs {needed}'
  if more := sorted(set(schema) - known - _NOTES):
    return f'{more[0]} is not supported here; what is: ' + ', '.join(
      sorted(known)
    )
  for name, (expected, is_valid) in _VALUES.items():
    if name in schema and not is_valid(schema[name]):
      return f'{name} should be {expected}, got {schema[name]!r:.80}'
  # Beside `anyOf` and `$ref`, a type is refused above.
  for value in _values(schema) if kind and 'type' in schema else ():
    if _types_of(value).isdisjoint(_types(schema)):
      return f'{kind} has {value!r:.80}, not of type {schema["type"]!r}'
  for what in ('Length', 'Items'):
    least, most = _limits(schema, what)
    if most is not None and least > most:
      return f'min{what} {least} exceeds max{what} {most}'
  names, required = [*schema.get('properties', ())], schema.get('required', [])
  if not isinstance(required, list) or any(x not in names for x in required):
    return f'required should be a list of properties, got {required!r:.80}'
  if kind == '$ref' and _found(root, schema['$ref']) is None:
    return f'$ref should name a part of the schema, got {schema["$ref"]!r}'
  if kind == '$ref' and schema['$ref'] in above:
    return f'{schema["$ref"]} contains itself: write its levels out'
  # One of them would be heeded, without a word of the others.
  ways = {'pattern'}, {'format'}, {'minLength', 'maxLength'}
  if sum(not way.isdisjoint(schema) for way in ways) > 1:
    return 'a string takes a pattern, a format, or lengths, one of the three'
  pattern = schema.get('pattern')
  # Inside of a JSON string, they would have to be written otherwise.
  escaped = {*range(32), ord('"'), ord('\\')}
  if pattern is not None and grammars.bytes_of(_whole(pattern)) & escaped:
    return (
      f'pattern {pattern!r} allows a quote, a backslash or a control '
      'character, which JSON writes otherwise: leave them out, as '
      '[^"\\\\\\x00-\\x1f] does'
    )
  return None
