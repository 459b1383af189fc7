"""Names of earlier releases in gin files, bindings and the marks of runs.

A user's gin file, or the `config.gin` of a run, may name modules and functions
by where they were. `renewed` rewrites such text before gin reads it, line by
line, so that gin's messages still count lines rightly.
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
# What gin files bound, and what it is called.
_SELECTORS = {
  'train_distilled.distillation_loss': 'recipes.distillation_loss',
  'train_distilled.drafter_texts': 'recipes.drafter_texts',
  'train_drafters.block_heads_config': 'recipes.block_heads_config',
  'train_drafters.block_heads_loss': 'recipes.block_heads_loss',
  'train_drafters.block_heads_params': 'recipes.block_heads_params',
  'train_drafters.spec_drafter_params': 'recipes.spec_drafter_params',
}
_IMPORT = re.compile(r'^from (specdec_jax[\w.]*) import (\w+)(?: as (\w+))?$')
_SELECTOR = re.compile(
  r'(?:(?<=^)|(?<=[@/\s(\[,]))(' + '|'.join(map(re.escape, _SELECTORS)) + r')\b'
)


def renewed(text: str) -> str:
  """The text of a gin file, or a binding, with today's names."""
  return '\n'.join(map(_renewed_line, text.split('\n')))


def _renewed_line(line: str) -> str:
  """One line; what stands in quotes or in a comment stays as it is."""
  if found := _IMPORT.match(line.rstrip()):
    module = f'{found[1]}.{found[2]}'
    package, _, name = _MODULES.get(module, module).rpartition('.')
    return f'from {package} import {name}' + (
      f' as {found[3]}' * bool(found[3])
    )
  parts = re.split(r"""('[^']*'|"[^"]*"|#.*)""", line)
  parts[::2] = [
    _SELECTOR.sub(lambda found: _SELECTORS[found[1]], part)
    for part in parts[::2]
  ]
  return ''.join(parts)
