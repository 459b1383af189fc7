"""Speculation inside T5X: its own checkpoints, gin files and launch scripts.

`SpeculativeEncoderDecoderModel` and `SpeculativeDecoderOnlyModel` replace T5X's
models, and decode with this package's T5 on T5X's parameters, sharded as T5X
sharded them. `speculative_decode` is a `decode_fn` for T5X's own models;
`load_draft` and `restore_with_draft` restore a draft model along with the
target. docs/t5x.md shows how to use them.
"""

import importlib
from typing import Any

_MODULES = {
  'SpeculativeDecoderOnlyModel': 'models',
  'SpeculativeEncoderDecoderModel': 'models',
  'load_draft': 't5_networks',
  'restore_with_draft': 't5_networks',
  'speculative_decode': 'decoding',
}
__all__ = tuple(_MODULES)


def __getattr__(name: str) -> Any:
  # `specdec infer` needs `names` of this package, and neither T5X nor the
  # TensorFlow that T5X imports.
  if name not in _MODULES:
    raise AttributeError(f'module {__name__!r} has no attribute {name!r}')
  module = importlib.import_module(f'{__name__}.{_MODULES[name]}')
  return getattr(module, name)
