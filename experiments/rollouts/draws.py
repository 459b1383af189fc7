"""Compares the draws of both engines with the policy's own probabilities.

    python -m experiments.rollouts.draws --model smollm2-135m --batch_size 16

If a token x is drawn from p, the distribution after the tokens before it, its
surprise -log p(x) has the entropy of p as its mean; it ends the text with
probability p(eos), and is the likeliest token with probability max p. What was
drawn less these means, summed over all tokens and divided by the square root of
the summed variances, is nearly a standard normal z, whatever the lengths of the
texts (the central limit theorem of martingales). The last row is a control,
drawn at another temperature, which has to be rejected. The policy's
probabilities are those of Tunix's network.
"""

import argparse
import dataclasses
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from experiments import report
from experiments.report import Cells, Table
from experiments.rollouts import policies
from specdec_jax.integrations.tunix import SpeculativeRollout

MODULE = 'experiments.rollouts.draws'
TITLE = "Draws of either engine against the policy's probabilities"
_NAMES = 'surprise', 'end', 'likeliest'
# Texts are scored in groups whose length is a multiple of this.
_BUCKET = 32
# One in 16,000 draws of a normal distribution is further from 0.
_LARGEST = 4.0


def measure(args: argparse.Namespace) -> Table:
  """Draws with each engine, and compares."""
  model, tokenizer = policies.make(args.model)
  config = policies.rollout_config(args.tokens)
  speculative = lambda **how: SpeculativeRollout(
    model, tokenizer, policies.mesh(), config, batch_size=args.batch_size, **how
  )
  plain = speculative(drafter='none')
  ways = {
    "Tunix's": (policies.vanilla(model, tokenizer, args.tokens), 1.0),
    'speculative, plain': (plain, 1.0),
    f'speculative, gamma {args.gamma}': (speculative(gamma=args.gamma), 1.0),
    f'plain, temperature {args.control}': (plain, args.control),
  }
  [step] = policies.prompts_of(args.seed, 1, args.prompts)
  prompts = [str(each) for each in step['prompts'] for _ in range(args.samples)]
  ids = [tokenizer.encode(prompt) for prompt in prompts]
  score, rows = scorer(model, tokenizer.eos_id()), list[Cells]()
  for name, (engine, temperature) in ways.items():
    texts, seconds, runs = [], 0.0, []
    for i in range(args.rounds):
      own = policies.rollout_config(args.tokens, temperature)
      own = dataclasses.replace(own, seed=args.seed * args.rounds + i)
      started = time.perf_counter()
      tokens = engine.generate(prompts, own).tokens
      # The first round compiles.
      seconds += (time.perf_counter() - started) * (i > 0)
      for prompt, drawn in zip(ids, tokens, strict=True):
        ends = [tokenizer.eos_id()] * (len(drawn) < args.tokens)
        texts.append((prompt, [*map(int, drawn), *ends]))
      if isinstance(engine, SpeculativeRollout):
        runs.append(engine.timed.figures()['tokens_per_target_run'])
    later = texts[len(prompts) :]
    num_later = sum(len(drawn) for _, drawn in later)
    zs = score(texts)
    rows.append(
      {
        'drawn by': name,
        'samples': len(texts),
        'tokens': sum(len(drawn) for _, drawn in texts),
        'per target run': float(np.mean(runs or [1.0])),
        'per second': num_later / seconds if later else None,
        **{f'z of {each}': z for each, z in zip(_NAMES, zs, strict=True)},
        'rejected': 'yes' if max(map(abs, zs)) > _LARGEST else 'no',
      }
    )
    print(rows[-1], file=sys.stderr, flush=True)
  note = (
    f'Rejected: a z beyond {_LARGEST:g}. The last row has to be. Seconds are '
    'those of all rounds but the first, which compiles.'
  )
  return Table(rows=rows, notes=[note])


def scorer(model: nnx.Module, eos_id: int) -> Any:
  """Makes a function of texts, pairs of prompt and drawn ids, that returns the
  z of each of `_NAMES`."""
  graphdef, state = nnx.split(model)

  @jax.jit
  def moments(state: Any, ids: jax.Array) -> tuple[jax.Array, jax.Array]:
    """What was drawn less its mean, and the variance; both `[3, B, T - 1]`."""
    num = ids.shape[1]
    positions = jnp.broadcast_to(jnp.arange(num), ids.shape)
    mask = jnp.tril(jnp.ones((num, num), bool))
    mask = jnp.broadcast_to(mask, (ids.shape[0], num, num))
    logits, _ = nnx.merge(graphdef, state)(ids, positions, None, mask)
    log_p = jax.nn.log_softmax(logits[:, :-1].astype(jnp.float32))
    p, drawn = jnp.exp(log_p), ids[:, 1:]
    surprise = -jnp.take_along_axis(log_p, drawn[..., None], -1)[..., 0]
    entropy = -(p * log_p).sum(-1)
    spread = (p * log_p**2).sum(-1) - entropy**2
    end, top = p[..., eos_id], p.max(-1)
    less = (
      surprise - entropy,
      (drawn == eos_id) - end,
      (drawn == p.argmax(-1)) - top,
    )
    return jnp.stack(less), jnp.stack(
      [spread, end * (1 - end), top * (1 - top)]
    )

  def score(texts: Sequence[tuple[list[int], list[int]]]) -> list[float]:
    sums, variances = np.zeros(3), np.zeros(3)
    ordered = sorted(texts, key=lambda text: len(text[0]) + len(text[1]))
    for i in range(0, len(ordered), 16):
      group = ordered[i : i + 16]
      longest = max(len(prompt) + len(drawn) for prompt, drawn in group)
      ids = np.zeros((16, -(-longest // _BUCKET) * _BUCKET), np.int32)
      for row, (prompt, drawn) in zip(ids, group, strict=False):
        row[: len(prompt) + len(drawn)] = prompt + drawn
      less, variance = map(np.asarray, moments(state, ids))
      for j, (prompt, drawn) in enumerate(group):
        # What follows the prompt's last token is the first that was drawn.
        span = slice(len(prompt) - 1, len(prompt) + len(drawn) - 1)
        sums += less[:, j, span].sum(-1, dtype=np.float64)
        variances += variance[:, j, span].sum(-1, dtype=np.float64)
    return [float(z) for z in sums / np.sqrt(variances)]

  return score


def main(argv: Sequence[str] | None = None) -> None:
  argv = sys.argv[1:] if argv is None else argv
  parser = argparse.ArgumentParser(
    prog=f'python -m {MODULE}',
    description=__doc__,
    formatter_class=argparse.RawTextHelpFormatter,
  )
  add = parser.add_argument
  add('--model', default='toy')
  add('--rounds', type=int, default=4)
  add('--prompts', type=int, default=16)
  add('--samples', type=int, default=2)
  add('--tokens', type=int, default=128)
  add('--batch_size', type=int, help='rows, speculative only')
  add('--gamma', type=int, default=3)
  told = 'its temperature; the toy, nearly uniform, needs 0.05'
  add('--control', type=float, default=0.9, help=told)
  add('--seed', type=int, default=0)
  add('--results', type=Path, default=Path('out'))
  args = parser.parse_args(argv)
  command = MODULE, argv
  report.measure(command, args.results, 'draws', TITLE, lambda: measure(args))


if __name__ == '__main__':
  main()
