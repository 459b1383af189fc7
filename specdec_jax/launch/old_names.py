"""Names of earlier releases in gin files, bindings and the marks of runs.

A user's gin file, or the `config.gin` of a run, may name modules by where they
were. `renewed` rewrites such text before gin reads it; a comparison of settings
rewrites the older side.
"""

import re

# Modules that gin files named, and where their contents are.
_MODULES = {
  'specdec_jax.cli.infer': 'specdec_jax.infer.infer',
  'specdec_jax.cli.infer_decoding': 'specdec_jax.infer.infer_decoding',
  'specdec_jax.cli.infer_models': 'specdec_jax.infer.infer_models',
  'specdec_jax.cli.train': 'specdec_jax.training.train',
  'specdec_jax.cli.train_distilled': 'specdec_jax.training.recipes',
  'specdec_jax.cli.train_drafters': 'specdec_jax.training.recipes',
  'specdec_jax.data.tasks': 'specdec_jax.text.tasks',
  'specdec_jax.training.datasets': 'specdec_jax.data.datasets',
  'specdec_jax.training.length_buckets': 'specdec_jax.data.length_buckets',
}
_FROM = re.compile(r'^from (specdec_jax[\w.]*) import (\w+)(?: as (\w+))?$')
_IMPORT = re.compile(r'^import (specdec_jax[\w.]+)(?: as (\w+))?$')


def renewed(text: str) -> str:
  """The text of a gin file with today's names, line by line."""
  if 'specdec_jax' not in text:
    return text
  return '\n'.join(map(_renewed_import, text.split('\n')))


def _renewed_import(line: str) -> str:
  """An import of a module that has moved, under the name that it had."""
  if found := _FROM.match(line.rstrip()):
    module, alias = f'{found[1]}.{found[2]}', found[3] or found[2]
  elif (found := _IMPORT.match(line.rstrip())) and found[2]:
    module, alias = found[1], found[2]
  else:
    return line
  if module not in _MODULES:
    return line
  package, _, name = _MODULES[module].rpartition('.')
  suffix = '' if name == alias else f' as {alias}'
  return f'from {package} import {name}{suffix}'
