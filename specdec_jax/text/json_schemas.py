"""Which JSON schemas are heeded exactly: whatever is not is refused."""

from collections.abc import Callable, Mapping
from typing import Any

_NOTES = {
  '$schema',
  '$id',
  '$comment',
  '$defs',
  'definitions',
  'title',
  'description',
  'default',
  'examples',
  'deprecated',
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
_FORMATS = 'date', 'date-time', 'uuid'


def check(
  schema: Any, *, pattern_bytes: Callable[[str], set[int]], place: str = '#'
) -> None:
  """Raises ValueError, with the place in the schema, for a keyword that would
  not be heeded; `pattern_bytes` says which bytes a pattern lets come."""
  if not isinstance(schema, Mapping):
    raise ValueError(f'JSON schema, {place}: it should be an object')
  kinds = [name for name in _ALONE if name in schema]
  if kinds:
    known = {kinds[0]} | _ALONE[kinds[0]]
  else:
    types = schema.get('type')
    types = types if isinstance(types, list) else [types]
    for each in types:
      if each not in _BY_TYPE:
        raise ValueError(
          f'JSON schema, {place}: type should be one of {", ".join(_BY_TYPE)}, '
          f'got {each!r}'
        )
    known = {'type'}.union(*(_BY_TYPE[each] for each in types))
    if 'object' in types and not schema.get('properties'):
      raise ValueError(f'JSON schema, {place}: an object needs properties')
    if 'array' in types and 'items' not in schema:
      raise ValueError(f'JSON schema, {place}: an array needs items')
  if unknown := sorted(set(schema) - known - _NOTES):
    raise ValueError(
      f'JSON schema, {place}: {unknown[0]} is not supported here; what is: '
      f'{", ".join(sorted(known))}'
    )
  _check_string(schema, place, pattern_bytes)
  for name in ('$defs', 'definitions', 'properties'):
    for key, value in (schema.get(name) or {}).items():
      check(value, pattern_bytes=pattern_bytes, place=f'{place}/{name}/{key}')
  for i, each in enumerate(schema.get('anyOf', ())):
    check(each, pattern_bytes=pattern_bytes, place=f'{place}/anyOf/{i}')
  if 'items' in schema:
    check(schema['items'], pattern_bytes=pattern_bytes, place=f'{place}/items')


def _check_string(
  schema: Mapping[str, Any],
  place: str,
  pattern_bytes: Callable[[str], set[int]],
) -> None:
  # One of them would be heeded, without a word of the others.
  ways = {'pattern', 'format'} & set(schema)
  if (
    ways
    and len({'pattern', 'format', 'minLength', 'maxLength'} & set(schema)) > 1
  ):
    raise ValueError(
      f'JSON schema, {place}: a string takes a pattern, a format, or lengths, '
      'one of the three'
    )
  if 'format' in schema and schema['format'] not in _FORMATS:
    raise ValueError(
      f'JSON schema, {place}: format should be one of {", ".join(_FORMATS)}, '
      f'got {schema["format"]!r}'
    )
  # Inside of a JSON string, they would have to be written otherwise.
  if 'pattern' in schema:
    escaped = {*range(32), ord('"'), ord('\\')}
    if pattern_bytes(schema['pattern']) & escaped:
      raise ValueError(
        f'JSON schema, {place}: pattern {schema["pattern"]!r} allows a quote, '
        'a backslash or a control character, which JSON writes otherwise: '
        'leave them out, as [^"\\\\\\x00-\\x1f] does'
      )
