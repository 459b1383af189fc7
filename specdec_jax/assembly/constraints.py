"""Grammars that texts must match: from options to arrays."""

import dataclasses
import json
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np

from specdec_jax import base
from specdec_jax.assembly.option_fields import option
from specdec_jax.files import text_lines
from specdec_jax.files.paths import user_path
from specdec_jax.text import grammars, json_schemas
from specdec_jax.text.vocabularies import AnyVocabulary


@dataclasses.dataclass(frozen=True, kw_only=True)
class Constraint:
  """What a text is restricted to; see `text.grammars`."""

  regex: str | None = option(
    None, 'give only texts that this matches as a whole', type=str
  )
  json_schema: Mapping[str, object] | str | None = option(
    None, 'give only JSON of this schema, which is a file or a text', type=str
  )


def check(constraint: Constraint) -> None:
  """Raises ValueError unless it is one grammar, or none."""
  regex, json_schema = constraint.regex, constraint.json_schema
  if regex is not None and json_schema is not None:
    raise ValueError('regex and json_schema exclude each other: give one')
  if regex is not None and not (isinstance(regex, str) and regex):
    raise ValueError(f'regex should be a regular expression, got {regex!r}')
  if json_schema is not None:
    schema_text(json_schema)


def schema_text(given: Mapping[str, object] | str) -> str:
  """Returns a schema as JSON, its keys in the order in which they were written;
  reads a file if `given` is a path."""
  text = given
  if isinstance(given, str) and not given.lstrip().startswith('{'):
    try:
      text = text_lines.read_whole(user_path(given))
    except ValueError as error:
      raise ValueError(f'json_schema: {error}') from error
  try:
    found = json.loads(text) if isinstance(text, str) else text
    if isinstance(found, Mapping):
      return json.dumps(found)
  except (RecursionError, TypeError, ValueError) as error:
    raise ValueError(f'json_schema is no JSON: {error}') from error
  raise ValueError(f'json_schema should be a JSON object, got {given!r:.80}')


def compiled(
  constraint: Constraint, vocabulary: AnyVocabulary | None
) -> base.Grammar | None:
  """Compiles a grammar, None if there is none; raises as `text.grammars`."""
  pattern, given = constraint.regex, f'regex {constraint.regex!r:.60}'
  if (schema := constraint.json_schema) is not None:
    pattern, given = json_schemas.to_regex(schema_text(schema)), 'json_schema'
  if pattern is None:
    return None
  assert vocabulary is not None
  try:
    return grammars.compiled(pattern, vocabulary)
  except ValueError as error:
    raise ValueError(f'{given}: {error}') from error


def of_rows(
  automata: Sequence[base.Grammar | None],
  which: Sequence[int],
  num_rows: int,
  num_logits: int,
) -> base.Grammar | None:
  """Packs the grammars of a batch: row i has `automata[which[i]]`, and rows
  beyond `which` may say anything. Returns None if no automaton is given; as all
  batches of a program are given the same, they all have a grammar, or none."""
  every = [each for each in automata if each is not None]
  if not every:
    return None
  # Sizes are rounded up to a few, so that few programs are compiled.
  num_states, num_classes = (
    _bucket(max(each.next.shape[i] for each in every)) for i in (0, 1)
  )
  arrays: Any = lambda value, *shape: np.full((num_rows, *shape), value)
  grammar: Any = base.Grammar(
    classes=arrays(np.uint16(0), num_logits),
    next=arrays(np.uint16(0), num_states, num_classes),
    guesses=arrays(np.int32(-1), num_states),
    states=arrays(np.int32(0)),
  )
  for row, i in enumerate(which):
    # None has no leaves: its row keeps a grammar that allows anything.
    pairs = zip(*map(jax.tree.leaves, (grammar, automata[i])), strict=False)
    for rows, own in pairs:
      # A vocabulary may have further ids, for larger models of its family.
      part = tuple(map(slice, np.minimum(rows.shape[1:], own.shape)))
      rows[(row, *part)] = own[part]
  return grammar


def _bucket(size: int) -> int:
  """Rounds a size up to 64, 96, 128, 192, ...: at most half as much again."""
  power = max(64, 2 ** (size - 1).bit_length())
  return power * 3 // 4 if size <= power * 3 // 4 and power > 64 else power
