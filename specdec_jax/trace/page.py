"""Traces as one HTML page that needs nothing else, not even a network.

Tokens show p, q and u on hover and on focus. The page's policy allows no script
but its own. Needs jinja2, which fills in `page.html` and escapes every value.
"""

import base64
import functools
import hashlib
import json
from typing import Any

from specdec_jax.assembly import recording
from specdec_jax.assembly.recording import Record
from specdec_jax.assembly.trace_files import Trace
from specdec_jax.cli import wording
from specdec_jax.launch.visible_text import visible
from specdec_jax.trace import templates


def render(traced: Trace) -> str:
  """Renders the page, to be written as UTF-8; ImportError without jinja2."""
  # The script makes one tooltip of all titles, that keyboard focus opens too,
  # and lets the arrow keys walk over tokens and iterations.
  return _template().render(
    traced=traced,
    facts_of_header=_facts_of_header(traced.header),
    meanings=wording.MEANINGS,
    style=templates.asset('page.css'),
    script=templates.asset('page.js'),
  )


@functools.cache
def _template() -> Any:
  return templates.template(
    'page.html',
    as_read=recording.as_read,
    digest=_digest,
    facts=_facts,
    number=_number,
  )


def _facts_of_header(header: Record) -> dict[str, str]:
  """Returns what stands below the title: all that is given but the models."""
  named = ('type', 'version', 'target', 'drafter')
  text = lambda value: value if isinstance(value, str) else json.dumps(value)
  return {
    name.replace('_', ' '): visible(text(value))
    for name, value in header.items()
    if name not in named and value is not None
  }


def _facts(token: Record) -> str:
  """Returns the lines that a token's tooltip shows."""
  verdict = token['verdict']
  numbers = {'p': token['p']}
  if verdict in recording.DRAFT_VERDICTS:
    numbers |= {'q': token['q'], 'acceptance': token['accept_prob']}
    if token['u'] is not None:
      numbers['u'] = token['u']
  return '\n'.join(
    [
      f'“{visible(token["text"])}” · id {token["token"]}',
      f'{verdict}: {wording.MEANINGS[verdict]}',
      *(f'{name} = {_number(value, ".4g")}' for name, value in numbers.items()),
    ]
  )


def _number(value: float | None, form: str) -> str:
  return '–' if value is None else format(value, form)


def _digest(source: str) -> str:
  """Returns what the page's policy calls an element of this content by."""
  digest = hashlib.sha256(f'\n{source}'.encode()).digest()
  return f"'sha256-{base64.b64encode(digest).decode()}'"
