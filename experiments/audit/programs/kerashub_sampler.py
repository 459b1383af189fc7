"""KerasHub's `SpeculativeSampler`: what it draws, and what it should.

    pip install keras-hub jax
    python experiments/audit/programs/kerashub_sampler.py

Models say the same of every token, so that its share is its probability.
"""

import os

os.environ['KERAS_BACKEND'] = 'jax'

import jax
import jax.numpy as jnp
import keras
import numpy as np
from keras_hub import samplers

NUM_DRAWS = 10_000


def constant(probs):
  """A model as KerasHub's samplers take one."""
  logits = jnp.log(jnp.asarray([probs]))
  return lambda prompt, cache, index: (
    jnp.tile(logits, (prompt.shape[0], 1)),
    None,
    cache,
  )


def share(title, target, draft, base, should):
  """Draws a token after a prompt of one token, each time with another seed."""
  sampler = samplers.SpeculativeSampler(
    num_speculative_tokens=1, base_sampler=base
  )

  def draw(seed):
    state = [(sampler.seed_generator.state, seed)]
    with keras.StatelessScope(state_mapping=state):
      found = sampler(
        constant(target),
        jnp.zeros((1, 2), 'int32'),
        index=1,
        mask=jnp.array([[True, False]]),
        draft_next=constant(draft),
      )
    return found[0, 1]

  seeds = np.zeros((NUM_DRAWS, 2), np.uint32)
  seeds[:, 0] = np.arange(NUM_DRAWS)
  drawn = np.asarray(jax.jit(jax.vmap(draw))(seeds))
  counts = np.bincount(drawn, minlength=len(target))
  print(f'{title}: {(counts / NUM_DRAWS).round(2).tolist()}, not {should}')


def ragged():
  """Greedy, two prompts of different lengths: the longer one is changed."""
  prompts = np.array([[1, 0, 0, 0, 0, 0], [1, 2, 0, 2, 0, 0]], 'int32')
  mask = np.array([[1, 0, 0, 0, 0, 0], [1, 1, 1, 1, 0, 0]], bool)
  sampler = samplers.SpeculativeSampler(num_speculative_tokens=1)
  found = sampler(
    constant([0.2, 0.5, 0.3]),
    jnp.asarray(prompts),
    index=1,
    mask=jnp.asarray(mask),
    draft_next=constant([0.2, 0.5, 0.3]),
  )
  back = np.asarray(found)[1][mask[1]].tolist()
  print(f'a prompt comes back as {back}, not {prompts[1][mask[1]].tolist()}')


if __name__ == '__main__':
  p, q = [0.6, 0.4], [0.6, 0.4]
  share('draft = target', p, q, samplers.RandomSampler(), p)
  p, q = [0.5, 0.3, 0.2], [0.6, 0.25, 0.15]
  share('draft near target', p, q, samplers.RandomSampler(), p)
  p, q = [0.5, 0.3, 0.2], [0.2, 0.6, 0.2]
  share('top-k 1', p, q, samplers.TopKSampler(k=1), [1.0, 0.0, 0.0])
  ragged()
