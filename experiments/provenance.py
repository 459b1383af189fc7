"""Identifies the code of a figure: its commit, and a digest of timed code."""

import ast
import contextlib
import functools
import hashlib
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import specdec_jax

# After a commit.
CHANGED = ' with changes'
_PACKAGE = Path(specdec_jax.__file__).parent
# Parts of the package whose changes make a figure outdated. No result is of a
# Gemma, and code that only shows figures changes none.
_PARTS = {
  'decoding': (
    *('decoding', 'arrays.py', 'base.py', 'trees.py'),
    *('sampling/distributions.py', 'sampling/keys.py', 'sampling/logits.py'),
  ),
  'drafters': ('drafters',),
  'measure': ('measure',),
  'models': ('models',),
  'verification': ('verification',),
}
_APART = ('models/gemma', 'models/presets.py')
# Earlier paths of files that have moved: digests name a file by its first path,
# so that a move by itself makes no figure old.
_EARLIER = {
  'decoding/exact_bits.py': 'measure/exact_bits.py',
  'decoding/rates.py': 'measure/metrics.py',
  'drafters/text_pool.py': 'data/text_pool.py',
  'measure/loops.py': 'measure/sides.py',
  'measure/timing.py': 'cli/timing.py',
  'measure/bench_command.py': 'cli/commands/measuring/bench.py',
  'measure/calibrate_command.py': 'cli/commands/measuring/calibrate.py',
  'measure/gamma_trials.py': 'theory/gamma_trials.py',
  'sampling/distributions.py': 'distributions.py',
  'sampling/grammars.py': 'grammars.py',
  'sampling/keys.py': 'keys.py',
  'sampling/logits.py': 'logits.py',
  'sampling/processors.py': 'processors.py',
}


def commit() -> str | None:
  """Finds the last commit of the package, and whether it was changed since;
  None if it is in no repository."""

  def git(*command: str) -> str:
    return subprocess.run(
      ['git', *command, '--', '.'],
      cwd=_PACKAGE,
      capture_output=True,
      text=True,
      check=True,
    ).stdout.strip()

  # A wheel is in no repository, and a machine may have no git.
  with contextlib.suppress(OSError, subprocess.CalledProcessError):
    found = git('log', '-1', '--format=%H')
    return found + CHANGED if git('diff', 'HEAD') else found or None
  return None


@functools.cache
def code(*more: str) -> str:
  """Computes the digest of each part of the code that is measured, by name, in
  a line that results keep; `more` are folders that few results measure."""
  parts = _PARTS | {name: (name,) for name in more}
  return ', '.join(
    f'{name} {digest(_sources(paths))}' for name, paths in parts.items()
  )


def changed_since(measured: str | None) -> list[str] | None:
  """Lists the parts that have another digest than in a line of `code`; None
  without such a line."""
  if not measured:
    return None
  before = dict(part.split(' ') for part in measured.split(', '))
  more = {'contrib'} & before.keys()
  now = dict(part.split(' ') for part in code(*more).split(', '))
  return [name for name in now if now[name] != before.get(name)]


def digest(sources: Mapping[str, str]) -> str:
  """Computes the digest of Python files by name, without their comments,
  docstrings and the words of errors: prose makes no figure old."""
  parts = [
    repr((name, _plain(ast.parse(text))))
    for name, text in sorted(sources.items())
  ]
  return hashlib.sha256('\n'.join(parts).encode()).hexdigest()[:10]


def _sources(paths: tuple[str, ...]) -> dict[str, str]:
  apart = [_PACKAGE / path for path in _APART]
  found = {}
  for path in paths:
    place = _PACKAGE / path
    files = place.rglob('*.py') if place.is_dir() else [place]
    for file in files:
      if not any(file.is_relative_to(each) for each in apart):
        name = file.relative_to(_PACKAGE).as_posix()
        name = _EARLIER.get(name, name)
        found[name] = file.read_text(encoding='utf-8')
  return found


def _plain(node: Any) -> Any:
  """Returns a syntax tree as lists, the same from every version of Python."""
  # `ast.dump` is not: from 3.13 on it leaves out empty fields. So are they
  # here, and `ctx`, which says again where a name stands.
  #   raise ValueError('no rows')  ->  ['Raise'], whatever the words are
  #   x = 1  ->  ['Assign', ('targets', [['Name', ('id', 'x')]]), ...]
  if isinstance(node, list):
    kept = [each for each in node if not _is_text(each)]
    return [_plain(each) for each in kept]
  if not isinstance(node, ast.AST):
    return node
  if isinstance(node, ast.Raise):
    return ['Raise']
  fields = [
    (name, _plain(value))
    for name, value in ast.iter_fields(node)
    if value not in (None, []) and name != 'ctx'
  ]
  return [type(node).__name__, *fields]


def _is_text(node: Any) -> bool:
  """Says whether a statement is a lone text, as docstrings are."""
  return (
    isinstance(node, ast.Expr)
    and isinstance(node.value, ast.Constant)
    and isinstance(node.value.value, str)
  )
