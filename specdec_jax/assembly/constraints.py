"""Texts that must match a grammar: from users' words to arrays."""

import dataclasses
import json
from collections.abc import Mapping, Sequence

from specdec_jax import base
from specdec_jax.assembly.option_fields import field_names, option
from specdec_jax.files.paths import user_path
from specdec_jax.text import grammars
from specdec_jax.text.vocabularies import AnyVocabulary


@dataclasses.dataclass(frozen=True, kw_only=True)
class Constraint:
  """Which texts may come at all; see `text.grammars`."""

  regex: str | None = option(
    None, 'give only texts that this matches as a whole', type=str
  )
  json_schema: Mapping[str, object] | str | None = option(
    None, 'give only JSON of this schema, which is a file or a text', type=str
  )


NAMES = tuple(field_names(Constraint))


def is_used(way: Constraint) -> bool:
  """Whether a way is a grammar."""
  return way.regex is not None or way.json_schema is not None


def check(way: Constraint) -> None:
  """Raises ValueError unless a way is one grammar, or none."""
  if way.regex is not None and way.json_schema is not None:
    raise ValueError('regex and json_schema exclude each other: give one')
  if way.regex is not None and not (isinstance(way.regex, str) and way.regex):
    raise ValueError(f'regex should be a regular expression, got {way.regex!r}')
  if way.json_schema is not None:
    _schema(way.json_schema)


def _schema(given: Mapping[str, object] | str) -> str:
  """A schema as JSON, in the order in which it was written."""
  text = given
  if isinstance(given, str) and not given.lstrip().startswith('{'):
    try:
      text = user_path(given).read_text(encoding='utf-8')
    except (OSError, UnicodeDecodeError) as error:
      raise ValueError(f'cannot read json_schema {given}: {error}') from error
  try:
    found = json.loads(text) if isinstance(text, str) else text
    if isinstance(found, Mapping):
      return json.dumps(found)
  except (TypeError, ValueError) as error:
    raise ValueError(f'json_schema is no JSON: {error}') from error
  raise ValueError(f'json_schema should be a JSON object, got {given!r:.80}')


def _automaton(
  way: Constraint, vocabulary: AnyVocabulary
) -> grammars.Automaton | None:
  pattern = way.regex
  if way.json_schema is not None:
    pattern = grammars.of_json_schema(_schema(way.json_schema))
  return None if pattern is None else grammars.compiled(pattern, vocabulary)


def table(
  ways: Sequence[Constraint], vocabulary: AnyVocabulary
) -> list[grammars.Automaton | None] | None:
  """Compiles the grammars of ways, once for all of their batches; None if all
  may say anything.

  Raises:
    ValueError: if a grammar cannot be compiled.
    ImportError: if the package that compiles it is missing.
  """
  if not any(map(is_used, ways)):
    return None
  return [_automaton(way, vocabulary) for way in ways]


def of_rows(
  made: Sequence[grammars.Automaton | None] | None,
  which: Sequence[int],
  *,
  num_rows: int,
  num_logits: int,
) -> base.Grammar | None:
  """What each row of a batch may say, as data: row i what `made[which[i]]` lets
  it; rows beyond, and all if there is no table, anything."""
  if made is None:
    return None
  return grammars.rows(
    [made[i] for i in which],
    num_rows=num_rows,
    num_logits=num_logits,
    among=made,
  )
