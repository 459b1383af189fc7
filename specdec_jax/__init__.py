"""Draft-then-verify decoding in JAX: the whole loop as one compiled program."""

__version__ = '0.1.0'

from specdec_jax import decoding, drafters, logits, theory, verification
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

__all__ = [
  'Context',
  'Draft',
  'Drafter',
  'LanguageModel',
  'Params',
  'Prompt',
  'Verification',
  'VerifyFn',
  'autoregressive',
  'decoding',
  'drafters',
  'logits',
  'speculative',
  'theory',
  'verification',
]
