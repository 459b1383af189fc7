"""Grammars that texts must match: from options to arrays."""

import dataclasses
import json
import re
from collections.abc import Mapping, Sequence

import numpy as np

from specdec_jax import base
from specdec_jax.assembly.option_fields import option
from specdec_jax.files import text_lines
from specdec_jax.files.paths import user_path
from specdec_jax.launch.numbers import json_object
from specdec_jax.text import grammars
from specdec_jax.text.vocabularies import AnyVocabulary

_NAMES = ('regex', 'json_schema', 'grammar')
# Every grammar has this rule, and no path.
_START_RULE = re.compile(r'^\s*start\b[^\n]*:', re.MULTILINE)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Constraint:
  """What a text is restricted to; see `text.grammars`."""

  regex: str | None = option(
    None, 'give only texts that this matches as a whole', type=str
  )
  json_schema: Mapping[str, object] | str | None = option(
    None, 'give only JSON of this schema, which is a file or a text', type=str
  )
  grammar: str | None = option(
    None,
    "give only texts of this grammar, in llguidance's form of Lark, which is a "
    'file or a text',
    type=str,
  )
  grammar_limits: Mapping[str, int] | None = option(
    None,
    "limits of a grammar's size and time, by llguidance's names, as JSON such "
    'as \'{"step_max_items": 10000}\'',
    type=json_object,
  )


def check(constraint: Constraint) -> None:
  """Raises ValueError unless it is one grammar, or none."""
  named = [name for name in _NAMES if getattr(constraint, name) is not None]
  if len(named) > 1:
    raise ValueError(f'{" and ".join(named)} exclude each other: give one')
  regex, grammar = constraint.regex, constraint.grammar
  if regex is not None and not (isinstance(regex, str) and regex):
    raise ValueError(f'regex should be a regular expression, got {regex!r}')
  if grammar is not None and not (isinstance(grammar, str) and grammar):
    raise ValueError(f'grammar should be a grammar as text, got {grammar!r}')
  stated_text(constraint)


def stated_text(constraint: Constraint) -> str | None:
  """Returns the text of a grammar, which may be in a file; None if there is
  none."""
  if constraint.json_schema is not None:
    return _schema_text(constraint.json_schema)
  grammar = constraint.grammar
  if grammar is not None and not _START_RULE.search(grammar):
    return _read('grammar', grammar)
  return constraint.regex if grammar is None else grammar


def _schema_text(source: Mapping[str, object] | str) -> str:
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


def number(
  constraint: Constraint, vocabulary: AnyVocabulary | None, num_logits: int
) -> int:
  """Returns the number of a grammar among those of `grammars.reader_of`, 0 for
  none. Raises ValueError if it cannot be compiled, and ImportError without the
  package that does so."""
  text = stated_text(constraint)
  if text is None:
    return 0
  assert vocabulary is not None
  [name] = [name for name in _NAMES if getattr(constraint, name) is not None]
  write = {
    'regex': grammars.of_regex,
    'json_schema': grammars.of_json_schema,
    'grammar': grammars.of_lark,
  }[name]
  limits = tuple((constraint.grammar_limits or {}).items())
  shown = f'regex {text!r:.60}' if name == 'regex' else name
  reader = grammars.reader_of(vocabulary, num_logits)
  try:
    return reader.number_of(grammars.Source(write(text), limits))
  except ValueError as error:
    raise ValueError(f'{shown}: {error}') from error


def of_rows(
  numbers: Sequence[int],
  num_rows: int,
  vocabulary: AnyVocabulary | None,
  num_logits: int,
) -> base.Grammar:
  """Packs the grammars of a batch, whose rows beyond `numbers` may say
  anything."""
  assert vocabulary is not None
  padded = np.zeros(num_rows, np.int32)
  padded[: len(numbers)] = numbers
  read = grammars.reader_of(vocabulary, num_logits)
  return base.Grammar(numbers=padded, read=read)  # type: ignore[arg-type]
