"""Speculative decoding in JAX: draft, verify and commit as one program.

`load`, `generate` and `stream` take names and texts. Below them are pure
functions on arrays: `speculative.generate` and `autoregressive.generate` are
the two loops, which take models, drafters and rules as arguments.
"""

__version__ = '0.2.0'

from typing import TYPE_CHECKING, Any

from specdec_jax import decoding, drafters, theory, verification
from specdec_jax.base import (
  Context,
  Draft,
  Drafter,
  LanguageModel,
  Params,
  Prompt,
  Verification,
  VerifyFn,
)
from specdec_jax.decoding import autoregressive, speculative
from specdec_jax.decoding.method import Method
from specdec_jax.sampling import logits

if TYPE_CHECKING:
  from specdec_jax.assembly.api import Completion, generate, load, stream
  from specdec_jax.assembly.conversation import Conversation

__all__ = [
  'Completion',
  'Context',
  'Conversation',
  'Draft',
  'Drafter',
  'LanguageModel',
  'Method',
  'Params',
  'Prompt',
  'Verification',
  'VerifyFn',
  'autoregressive',
  'decoding',
  'drafters',
  'generate',
  'load',
  'logits',
  'speculative',
  'stream',
  'theory',
  'verification',
]


def __getattr__(name: str) -> Any:
  """Imports `load` and its companions when asked: they import every network."""
  if name in ('Completion', 'Conversation', 'generate', 'load', 'stream'):
    from specdec_jax.assembly import api, conversation

    return getattr(conversation if name == 'Conversation' else api, name)
  raise AttributeError(f'module {__name__!r} has no attribute {name!r}')


def __dir__() -> list[str]:
  """Lists these, too, so that they can be completed at a prompt."""
  return sorted({*globals(), *__all__})
