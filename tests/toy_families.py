"""Every family of language models in miniature, by name."""

import functools
from collections.abc import Callable
from typing import Any

from specdec_jax.base import LanguageModel
from specdec_jax.models import families
from tests import toy, toy_gemma, toy_t5

# From a size of the vocabulary, and a number of layers, to the sizes.
_CONFIGS: dict[str, Callable[..., Any]] = {
  'Llama': toy.llama_config,
  'Llama, later': functools.partial(toy.llama_config, **toy.LATER_LLAMA),
  'Gemma 2': toy_gemma.gemma_2,
  'Gemma 3': toy_gemma.decoder,
  'Gemma 4': toy_gemma.gemma_4,
  'Gemma 4, experts': toy_gemma.gemma_4_moe,
  'T5Gemma': toy_gemma.encoder_decoder,
  'T5': toy_t5.config,
  'umT5': functools.partial(toy_t5.config, has_layer_relpos=True),
}
NAMES = tuple(_CONFIGS)


def make(
  name: str, vocab_size: int, *, num_layers: int, seed: int = 1
) -> tuple[LanguageModel, Any]:
  """A model and random params of it."""
  config = _CONFIGS[name](vocab_size, num_layers=num_layers)
  if 'Llama' in name:
    params = toy.llama_params(config, seed=seed)
  elif 'Gemma' in name:
    params = toy_gemma.params(config, seed=seed)
  else:
    params = toy_t5.params(config, seed=seed, scale=2.5)
  return families.language_model(config), params


def has_encoder(name: str) -> bool:
  """Whether its prompts have encoder rows."""
  return families.has_encoder(_CONFIGS[name](4, num_layers=1))


def networks(target, sizes, *, gamma: int):
  """The target that keeps what a drafter on its states reads, and the drafter's
  network, from the sizes of both."""
  bound = families.bind(target, sizes, width=gamma + 1)
  return bound.target, bound.model
