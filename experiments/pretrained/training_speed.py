"""How fast a Spec-Drafter learns on this device.

    python -m experiments.pretrained.training_speed --tokens=tokens/debian_ende

Target tokens per processor second and per second of steps on batches of every
length, and their means over an epoch. Medians of `--repeats` steps each.
"""

import argparse
import dataclasses
import functools
import time

import jax
import jax.numpy as jnp
import numpy as np

from experiments.xia2023 import glancing, recipes
from experiments.xia2023.batches import from_length_buckets
from specdec_jax.launch import compilation_cache
from specdec_jax.models import presets
from specdec_jax.training import loop, optimizers
from specdec_jax.training.data import token_files


def main() -> None:
  args = _parser().parse_args()
  compilation_cache.enable()
  config = presets.spec_drafter(args.drafter)
  config = dataclasses.replace(config, dtype=jnp.dtype(args.dtype))
  batches, counts = _batches(args)
  optimizer = optimizers.adamw(0.0015, max_grad_norm=5.0)
  loss_fn = glancing.block_loss(
    config, gamma=args.gamma, num_blocks=args.num_blocks
  )
  step_fn = jax.jit(
    functools.partial(loop.step, loss_fn=loss_fn, optimizer=optimizer),
    donate_argnums=0,
  )
  params = recipes.spec_drafter_params(
    config, jax.random.key(0), target=args.target
  )
  run = loop.new_run(config, optimizer, seed=0, params=params)
  totals = np.zeros(3)
  for length, batch in sorted(batches.items()):
    measured = []
    for i in range(args.repeats + 1):
      begun = time.process_time(), time.perf_counter()
      run, metrics = step_fn(run, batch)
      targets = float(metrics['weight'])
      ended = time.process_time(), time.perf_counter()
      if i:  # The first one compiles.
        measured.append([targets, *np.subtract(ended, begun)])
    medians = np.median(measured, axis=0)
    totals += medians * counts[length]
    _report(f'{len(batch["decoder_target_tokens"])} rows of {length}', medians)
  _report('all', totals)


def _batches(args: argparse.Namespace) -> tuple[dict, dict]:
  """Makes a batch of each length, and counts those of an epoch."""
  dataset = glancing.with_ratio(
    from_length_buckets(
      args.tokens, batch_tokens=args.batch_tokens, limits=args.lengths
    ),
    train_steps=1,
  )
  tokens = token_files.load(f'{args.tokens}/train.npz')
  lengths = [texts.lengths for texts in tokens.features.values()]
  longest = np.max(lengths, axis=0)
  buckets = np.searchsorted(args.lengths, longest)
  counts = {
    length: np.sum(buckets == i) / (args.batch_tokens // length)
    for i, length in enumerate(args.lengths)
  }
  wanted = sum(count >= 1 for count in counts.values())
  batches, position = {}, 0
  while len(batches) < wanted:
    batch = dataset.batch(position)
    batches.setdefault(batch['decoder_target_tokens'].shape[1], batch)
    position += 1
  return batches, counts


def _report(name: str, measured: np.ndarray) -> None:
  targets, processor, seconds = measured
  print(
    f'{name}: {targets / processor:,.0f} targets per processor second, '
    f'{targets / seconds:,.0f} per second',
    flush=True,
  )


def _parser() -> argparse.ArgumentParser:
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  add = parser.add_argument
  add('--tokens', required=True, help='what specdec data prepare wrote')
  add('--target', default='ende-mini')
  add('--drafter', default='mini_2_1')
  add('--dtype', default='bfloat16')
  add('--gamma', type=int, default=10)
  add('--num_blocks', type=int, default=12)
  add('--batch_tokens', type=int, default=2048)
  add(
    '--lengths',
    type=int,
    nargs='+',
    default=[8, 12, 16, 20, 24, 32, 48, 64],
  )
  add('--repeats', type=int, default=3)
  return parser


if __name__ == '__main__':
  main()
