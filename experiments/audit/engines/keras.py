"""KerasHub on JAX: `SpeculativeSampler` and the samplers that it is made from,
over tables of logits by the last token."""

import functools
import os
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from experiments.audit import ways
from experiments.audit.ways import Tokens, Way


def engine() -> Iterator[Way]:
  """Its ways, in one row and in four of different lengths."""
  samplers = load()
  speculative = functools.partial(
    samplers.SpeculativeSampler, num_speculative_tokens=ways.GAMMA, seed=0
  )
  bases = (
    functools.partial(samplers.RandomSampler, seed=0),
    functools.partial(samplers.TopKSampler, k=ways.TOP_K, seed=0),
  )
  for (setting, top_k), base in zip(ways.SETTINGS.items(), bases, strict=True):
    for name, make, greedy in (
      ('plain', base, samplers.GreedySampler),
      (
        'draft model',
        lambda base=base: speculative(base_sampler=base()),
        speculative,
      ),
    ):
      for prompts in (ways.ONE, ways.FOUR):
        likeliest = decode(greedy, prompts, 1, 0)[0]
        yield Way(
          f'{name}, {setting}, batch {len(prompts)}',
          ways.by_prompt(functools.partial(decode, make, prompts), prompts),
          ways.of_table(top_k),
          prompts,
          10_000,
          lambda prompt, found=likeliest, prompts=prompts: found[
            prompts.index(prompt)
          ],
        )


def load() -> Any:
  """The module of KerasHub's samplers, on JAX."""
  os.environ['KERAS_BACKEND'] = 'jax'
  return ways.package('keras_hub').samplers


def decode(
  make: Callable[[], Any], prompts: tuple[Tokens, ...], num: int, seed: int
) -> np.ndarray:
  """`num` calls of a sampler, each with its own seed: `[num, B, L]`."""
  import jax
  import jax.numpy as jnp
  import keras

  # KerasHub asks for the logits of what stands at `index`.
  next_of = lambda table: (
    lambda prompt, cache, index: (
      jnp.asarray(table)[jnp.take(prompt, index - 1, axis=1)],
      None,
      cache,
    )
  )
  target, draft = ways.tables()
  sampler = make()
  lengths = np.array([*map(len, prompts)])
  width = lengths.max() + ways.NUM_TOKENS
  tokens = np.array([(*ids, *[0] * (width - len(ids))) for ids in prompts])
  options = {}
  if isinstance(sampler, load().SpeculativeSampler):
    options['draft_next'] = next_of(draft)

  def call(state: jax.Array) -> jax.Array:
    own = [(sampler.seed_generator.state, state)] if num > 1 else []
    with keras.StatelessScope(state_mapping=own):
      return sampler(
        next_of(target),
        jnp.asarray(tokens, jnp.int32),
        # Where KerasHub starts a ragged batch; the mask keeps longer prompts.
        index=int(lengths.min()),
        mask=jnp.asarray(np.arange(width) < lengths[:, None]),
        **options,
      )

  states = np.zeros((num, 2), np.uint32)
  states[:, 0] = np.arange(num) + seed * num
  found = np.asarray(jax.jit(jax.vmap(call))(states))
  places = lengths[:, None] + np.arange(ways.NUM_TOKENS)
  return np.take_along_axis(found, places[None], axis=2)
