"""Which JSON schemas are heeded exactly: whatever is not is refused."""

from collections.abc import Callable, Mapping
from typing import Any

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
_FORMATS = 'date', 'date-time', 'uuid'


def check(
  schema: Any, *, pattern_bytes: Callable[[str], set[int]], place: str = '#'
) -> None:
  """Raises ValueError, with the place in the schema, for a keyword that would
  not be heeded; `pattern_bytes` says which bytes a pattern lets come."""
  if complaint := _complaint(schema, pattern_bytes):
    raise ValueError(f'JSON schema, {place}: {complaint}')
  inner = {f'anyOf/{i}': x for i, x in enumerate(schema.get('anyOf', ()))}
  for name in ('$defs', 'definitions', 'properties'):
    inner |= {f'{name}/{key}': x for key, x in (schema.get(name) or {}).items()}
  if 'items' in schema:
    inner['items'] = schema['items']
  for name, each in inner.items():
    check(each, pattern_bytes=pattern_bytes, place=f'{place}/{name}')


def _complaint(
  schema: Any, pattern_bytes: Callable[[str], set[int]]
) -> str | None:
  if not isinstance(schema, Mapping):
    return 'it should be an object'
  types = schema.get('type')
  types = types if isinstance(types, list) else [types]
  kind = next((name for name in _ALONE if name in schema), None)
  if kind is not None:
    known = {kind} | _ALONE[kind]
  elif unknown := [each for each in types if each not in _BY_TYPE]:
    return f'type should be one of {", ".join(_BY_TYPE)}, got {unknown[0]!r}'
  else:
    known = {'type'}.union(*(_BY_TYPE[each] for each in types))
    for each, needed in (('object', 'properties'), ('array', 'items')):
      if each in types and not schema.get(needed):
        return f'an {each} needs {needed}'
  if more := sorted(set(schema) - known - _NOTES):
    return f'{more[0]} is not supported here; what is: ' + ', '.join(
      sorted(known)
    )
  # One of them would be heeded, without a word of the others.
  ways = {'pattern'}, {'format'}, {'minLength', 'maxLength'}
  if sum(not way.isdisjoint(schema) for way in ways) > 1:
    return 'a string takes a pattern, a format, or lengths, one of the three'
  if 'format' in schema and schema['format'] not in _FORMATS:
    return (
      f'format should be one of {", ".join(_FORMATS)}, got {schema["format"]!r}'
    )
  # Inside of a JSON string, they would have to be written otherwise.
  escaped = {*range(32), ord('"'), ord('\\')}
  if 'pattern' in schema and pattern_bytes(schema['pattern']) & escaped:
    return (
      f'pattern {schema["pattern"]!r} allows a quote, a backslash or a control '
      'character, which JSON writes otherwise: leave them out, as '
      '[^"\\\\\\x00-\\x1f] does'
    )
  return None
