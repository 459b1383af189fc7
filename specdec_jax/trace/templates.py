"""The templates and style sheets of the renderings of a trace."""

import functools
from collections.abc import Callable
from importlib import resources
from typing import Any

from specdec_jax.cli import wording
from specdec_jax.files.require import require
from specdec_jax.launch.visible_text import visible


@functools.cache
def asset(name: str) -> str:
  """Reads a file beside this one."""
  source = resources.files('specdec_jax.trace').joinpath(name)
  return source.read_text(encoding='utf-8')


def template(name: str, **filters: Callable[..., object]) -> Any:
  """Reads a template beside this one, which escapes every value and has the
  filters below, and others; ImportError without jinja2."""
  jinja2 = require('jinja2', extra='models', purpose='to draw a trace')
  strict = jinja2.StrictUndefined
  environment = jinja2.Environment(autoescape=True, undefined=strict)
  environment.filters |= {
    'count_of': wording.count,
    'ordinal': wording.ordinal,
    'shown': wording.shown,
    'summary_line': wording.summary_line,
    'visible': lambda text, keep='': visible(text, keep=keep),
    **filters,
  }
  return environment.from_string(asset(name))
