"""Speculation inside Tunix: rollouts of its trainers, and decoders of models in
memory.

`SpeculativeRollout` is an engine for `ClusterConfig.rollout_engine`; `load`
returns a decoder for `specdec_jax.generate`. docs/rollouts.md shows both.
"""

import importlib
from typing import Any

_MODULES = {'SpeculativeRollout': 'rollout', 'load': 'decoders'}
__all__ = tuple(_MODULES)


def __getattr__(name: str) -> Any:
  # The package's own modules are imported where Tunix is not installed.
  if name not in _MODULES:
    raise AttributeError(f'module {__name__!r} has no attribute {name!r}')
  module = importlib.import_module(f'{__name__}.{_MODULES[name]}')
  return getattr(module, name)
