"""The text of a grammar, which may lie in a file."""

import json
import re
from collections.abc import Mapping

from specdec_jax.files import text_lines
from specdec_jax.files.paths import user_path

# Every grammar has this rule, and no path.
_START_RULE = re.compile(r'^\s*start\b[^\n]*:', re.MULTILINE)


def of_lark(source: str) -> str:
  """Returns a grammar in llguidance's form of Lark; `source` is the grammar or
  the path of its file."""
  if _START_RULE.search(source):
    return source
  return _read('grammar', source)


def of_schema(source: Mapping[str, object] | str) -> str:
  """Returns a schema as JSON, its keys in the order in which they were written;
  `source` is the schema, its text, or the path of a file with the text."""
  text = source
  if isinstance(source, str) and not source.lstrip().startswith('{'):
    text = _read('json_schema', source)
  try:
    schema = json.loads(text) if isinstance(text, str) else text
    if isinstance(schema, Mapping):
      return json.dumps(schema, allow_nan=False)
  except (RecursionError, TypeError, ValueError) as error:
    raise ValueError(f'json_schema is no JSON: {error}') from error
  raise ValueError(f'json_schema should be a JSON object, got {source!r:.80}')


def _read(name: str, path: str) -> str:
  try:
    return text_lines.read_whole(user_path(path))
  except ValueError as error:
    raise ValueError(f'{name}: {error}') from error
