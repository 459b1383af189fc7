"""A small model that the tests of `specdec_jax.generate` decode with."""

from typing import Any

import specdec_jax
from specdec_jax.assembly.completions import Completion
from specdec_jax.assembly.decoder import Decoder

TEXTS = ['the in ab', 'ab', 'in the the', 'the ab ab ab', 'in']
NUM_NEW = 8


def generate(decoder: Decoder, texts: Any, **options: Any) -> list[Completion]:
  """Decodes a few new tokens of texts, two at once."""
  settings = {'max_new_tokens': NUM_NEW, 'batch_size': 2} | options
  return list(specdec_jax.generate(decoder, texts, **settings))
