"""Makes the checkpoint of T5X whose layers are scanned; never edit it by hand.

Needs T5X, which is no dependency of the package; see docs/t5x.md.

  python tests/golden/make_t5x_scanned.py [--output tests/golden/t5x]

Writes `t5x_scanned/checkpoint_3`, a random `t5x.examples.scalable_t5` in T5X's
own format as T5X writes it, and `golden_scanned.npz` with a batch of padded
encoder ids, decoder ids and their teacher-forced logits in float32.
"""

import argparse
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
from t5x import checkpoints, optimizers, partitioning, train_state
from t5x.examples.scalable_t5 import network

SIZES = {
  'vocab_size': 48,
  'emb_dim': 16,
  'num_heads': 2,
  'num_encoder_layers': 3,
  'num_decoder_layers': 2,
  'head_dim': 4,
  'mlp_dim': 24,
  'mlp_activations': ('gelu', 'linear'),
  'dropout_rate': 0.0,
}


def randomised(params):
  """Weights that differ in every element, under which scores are not sharp."""
  rng = np.random.default_rng(0)

  def draw(path, leaf):
    name = jax.tree_util.keystr(path)
    if 'scale' in name:
      return rng.uniform(0.5, 1.5, leaf.shape).astype(np.float32)
    is_score = 'query' in name or 'key' in name
    std = 0.15 if is_score else 1.0 if 'embedding' in name else 0.3
    return (std * rng.standard_normal(leaf.shape)).astype(np.float32)

  return jax.tree_util.tree_map_with_path(draw, params)


def batch():
  """Ids `[3, 14]`, right-padded with 0, and decoder ids `[3, 11]`."""
  rng = np.random.default_rng(1)
  lengths = np.array([14, 6, 1])
  ids = rng.integers(2, SIZES['vocab_size'], (3, 14))
  ids *= np.arange(14)[None] < lengths[:, None]
  decoder_ids = rng.integers(2, SIZES['vocab_size'], (3, 11))
  decoder_ids[:, 0] = 0
  return ids.astype(np.int32), decoder_ids.astype(np.int32)


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__.split('\n')[0])
  parser.add_argument(
    '--output', type=pathlib.Path, default=pathlib.Path('tests/golden/t5x')
  )
  output = parser.parse_args().output
  module = network.Transformer(network.T5Config(**SIZES))
  ids, decoder_ids = batch()
  variables = module.init(
    jax.random.key(0),
    jnp.asarray(ids),
    jnp.asarray(decoder_ids),
    jnp.asarray(decoder_ids),
    enable_dropout=False,
  )
  params = randomised(variables['params'])
  logits = module.apply(
    {'params': params},
    jnp.asarray(ids),
    jnp.asarray(decoder_ids),
    # T5X hides padded targets; none of these is padding.
    jnp.ones_like(jnp.asarray(decoder_ids)),
    enable_dropout=False,
  )
  state = train_state.FlaxOptimTrainState.create(
    optimizers.sgd(learning_rate=0.1), {**variables, 'params': params}
  )
  state = state.replace_step(np.int32(3))
  folder = output / 't5x_scanned'
  checkpoints.Checkpointer(
    state, partitioning.PjitPartitioner(num_partitions=1), str(folder)
  ).save(state)
  np.savez(
    output / 'golden_scanned.npz',
    encoder_tokens=ids,
    decoder_tokens=decoder_ids,
    logits=np.asarray(logits, np.float32),
  )
  print(np.abs(logits).max(), sorted(p.name for p in folder.iterdir()))


if __name__ == '__main__':
  main()
