"""Tunix's sampler, which has no speculation, as a control: over a network that
is a table of logits by the last token."""

import functools
from collections.abc import Iterator
from typing import Any

import numpy as np

from experiments.audit import ways
from experiments.audit.ways import Way

# Ids that are no tokens of the table: padding, start and end.
_PAD, _BOS, _EOS = 8, 9, 10


def engine() -> Iterator[Way]:
  """Its ways; all draws are rows of one batch, whose lengths differ."""
  ways.package('tunix')
  sampler = _sampler()
  draw = functools.partial(_draw, sampler)
  for setting, top_k in ways.SETTINGS.items():
    options = {'temperature': 1.0, 'top_p': 1.0, 'top_k': top_k}
    yield Way(
      f'plain, {setting}, batch all',
      ways.by_prompt(functools.partial(draw, options), ways.FOUR),
      ways.of_table(top_k),
      ways.FOUR,
      20_000,
      lambda prompt: draw({}, 1, 0)[0, ways.FOUR.index(prompt)],
    )


def _draw(sampler: Any, options: dict, num: int, seed: int) -> np.ndarray:
  texts = [' '.join(map(str, prompt)) for prompt in ways.FOUR] * num
  output = sampler(
    texts, max_generation_steps=ways.NUM_TOKENS, seed=seed, **options
  )
  return np.array(output.tokens).reshape(num, len(ways.FOUR), ways.NUM_TOKENS)


def _sampler() -> Any:
  import jax.numpy as jnp
  from flax import nnx
  from tunix.generate import sampler

  class Tokenizer:
    encode = staticmethod(lambda text: [int(part) for part in text.split()])
    decode = staticmethod(lambda ids: ' '.join(map(str, ids)))
    bos_id = staticmethod(lambda: _BOS)
    eos_id = staticmethod(lambda: _EOS)
    pad_id = staticmethod(lambda: _PAD)

  class Table(nnx.Module):
    def __init__(self, logits: np.ndarray):
      self.logits = nnx.Param(jnp.asarray(logits))

    def init_cache(self, batch_size: int, cache_size: int, dtype: Any) -> dict:
      del cache_size
      return {'layer_0': {'end_index': jnp.zeros(batch_size, dtype)}}

    def __call__(self, tokens, positions, cache, attention_mask):
      del positions, attention_mask
      return self.logits[...][tokens], cache

  return sampler.Sampler(
    Table(ways.tables()[0]),
    Tokenizer(),
    sampler.CacheConfig(
      cache_size=16, num_layers=1, num_kv_heads=1, head_dim=1
    ),
  )
