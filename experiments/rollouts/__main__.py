"""Runs Tunix's GRPO with its own rollouts and with speculative ones.

    python -m experiments.rollouts --steps 3
    python -m experiments.rollouts --pairs --model smollm2-135m --batch_size 8

Each step writes a line of JSON: the mean reward, the seconds of its rollouts,
and for speculative ones tokens per target run. Trainings whose lines a stopped
run has left are not repeated. Engines train in turns by seed; with `--pairs`
the speculative one alone trains, and both decode in each step. With `--beta`
the policy is kept near what it began from, and lines, which come when a
training ends, have Tunix's KL. `summary.py` sums up all seeds.
"""

import argparse
import dataclasses
import functools
import json
import re
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import optax
from tunix.rl import rl_cluster
from tunix.rl.grpo import grpo_learner

from experiments import report
from experiments.report import Cells, Table
from experiments.rollouts import policies, summary
from specdec_jax.integrations.tunix import SpeculativeRollout

MODULE = 'experiments.rollouts'
ENGINES = 'vanilla', 'speculative'


def reward(prompts, completions, **_: Any) -> list[float]:
  """1 for a completion with the right sum, and the share of its digits."""
  found = []
  for prompt, completion in zip(prompts, completions, strict=True):
    right = sum(map(int, re.findall(r'\d+', str(prompt))))
    is_right = str(right) in re.findall(r'\d+', completion)
    digits = sum(letter.isdigit() for letter in completion)
    found.append(is_right + digits / max(len(completion), 1))
  return found


def cluster_config(engine: str, args: argparse.Namespace) -> Any:
  """What a training is told, the same for both engines."""
  drafts = {} if args.gamma is None else {'gamma': args.gamma}
  mesh = policies.mesh()
  return rl_cluster.ClusterConfig(
    role_to_mesh=dict.fromkeys(
      (
        rl_cluster.Role.ACTOR,
        rl_cluster.Role.REFERENCE,
        rl_cluster.Role.ROLLOUT,
      ),
      mesh,
    ),
    rollout_engine='vanilla'
    if engine == 'vanilla'
    else functools.partial(
      SpeculativeRollout, batch_size=args.batch_size, **drafts
    ),
    offload_to_cpu=False,
    training_config=rl_cluster.RLTrainingConfig(
      actor_optimizer=optax.adam(args.learning_rate),
      eval_every_n_steps=args.steps + 1,
      max_steps=args.steps,
      mini_batch_size=args.prompts,
      # Less memory; rollouts decode all prompts of a step together.
      train_micro_batch_size=1,
      rollout_micro_batch_size=args.prompts,
      compute_logps_micro_batch_size=1,
    ),
    rollout_config=policies.rollout_config(args.tokens),
  )


def train(engine: str, args: argparse.Namespace, seed: int, write: Any) -> None:
  """Trains a fresh policy with one engine, and writes a row per step."""
  model, tokenizer = policies.make(args.model)
  cluster = rl_cluster.RLCluster(
    actor=model,
    # Another copy of the same weights, which stays as it is.
    reference=policies.make(args.model)[0] if args.beta else None,
    tokenizer=tokenizer,
    cluster_config=cluster_config(engine, args),
  )
  own, steps = cluster.rollout, list[Cells]()
  generate = own.generate
  other = lambda: policies.vanilla(own.model(), tokenizer, args.tokens)
  others = [other()] if args.pairs else []

  def timed(prompts: list[str], config: Any, **named: Any) -> Any:
    row = {'engine': engine, 'seed': seed, 'step': len(steps) + 1}
    # Without one, Tunix's engine draws with the same key in each call.
    config = dataclasses.replace(config, seed=seed * args.steps + len(steps))
    ways = [('', generate), *(('vanilla_', o.generate) for o in others)]
    outputs = {}
    # Each decodes first in every other step.
    for prefix, way in ways[:: 1 if len(steps) % 2 else -1]:
      started = time.perf_counter()
      found = way(prompts, config, **named)
      row[f'{prefix}seconds'] = time.perf_counter() - started
      row[f'{prefix}tokens'] = sum(map(len, found.tokens))
      outputs[prefix] = found
    if isinstance(own, SpeculativeRollout):
      row['loop_seconds'] = own.timed.seconds
      row |= own.timed.figures()
    steps.append(row)
    return outputs['']

  def rewarded(prompts, completions, **named: Any) -> list[float]:
    found = reward(prompts, completions, **named)
    steps[-1]['reward'] = float(np.mean(found))
    if not args.beta:
      write(steps[-1])
    return found

  own.generate = timed
  learner = grpo_learner.GRPOLearner(
    rl_cluster=cluster,
    # The KL of GRPO's paper (https://arxiv.org/abs/2402.03300, equation 4), not
    # Tunix's default, whose gradient is zero on average.
    algo_config=grpo_learner.GRPOConfig(
      num_generations=args.samples, beta=args.beta, kl_loss_mode='low_var_kl'
    ),
    reward_fns=rewarded,
  )
  logger = cluster.actor_trainer.metrics_logger
  learner.train(policies.prompts_of(seed, args.steps, args.prompts))
  if args.beta:
    # Tunix tells a step's KL during later ones, and the last when it ends.
    kls = logger.get_metric_history('actor', 'kl', 'train')
    for row, kl in zip(steps, kls, strict=True):
      write(row | {'kl': float(kl)})


def main(argv: Sequence[str] | None = None) -> None:
  argv = sys.argv[1:] if argv is None else argv
  parser = argparse.ArgumentParser(prog=f'python -m {MODULE}')
  parser.add_argument('--model', default='toy')
  parser.add_argument('--steps', type=int, default=3)
  parser.add_argument('--seeds', type=int, default=1)
  parser.add_argument('--prompts', type=int, default=2)
  parser.add_argument('--samples', type=int, default=4)
  parser.add_argument('--tokens', type=int, default=192)
  parser.add_argument('--batch_size', type=int, help='rows, speculative only')
  parser.add_argument('--pairs', action='store_true')
  parser.add_argument('--gamma', type=int, help='by default, if it pays')
  parser.add_argument('--learning_rate', type=float, default=1e-3)
  parser.add_argument(
    '--beta', type=float, default=0.0, help='weight of the KL from the start'
  )
  parser.add_argument('--output', type=Path, default=Path('out/rollouts.jsonl'))
  parser.add_argument(
    '--results', type=Path, help='folder of the summary, if another than that'
  )
  args = parser.parse_args(argv)
  folder = args.results or args.output.parent
  run = functools.partial(measure, args, folder)
  of_model = '' if args.model == 'toy' else f' of {args.model}'
  title = f'GRPO{of_model} with either engine of rollouts'
  report.measure((MODULE, argv), folder, summary.NAME, title, run)


def measure(args: argparse.Namespace, folder: Path) -> Table:
  """Trains with each engine and seed, and sums up what was written."""
  args.output.parent.mkdir(parents=True, exist_ok=True)
  elsewhere = 'seeds', 'output', 'results'
  settings = {k: v for k, v in vars(args).items() if k not in elsewhere}
  settings['code'] = report.of_code()['code']
  rows, left = list[Cells](), report.lines(args.output)

  def write(row: Cells) -> None:
    line = json.dumps(row | {'settings': settings})
    print(line, flush=True)
    with args.output.open('a') as file:
      file.write(line + '\n')
    rows.append(row)

  def found(engine: str, seed: int) -> list[Cells]:
    """Returns the rows that are left of a training, if they are all."""
    key = {'engine': engine, 'seed': seed, 'settings': settings}
    own = [row for row in left if row.items() >= key.items()][-args.steps :]
    whole = [*range(1, args.steps + 1)]
    return own if [row['step'] for row in own] == whole else []

  engines = ENGINES[1:] if args.pairs else ENGINES
  for seed in range(args.seeds):
    for engine in engines if seed % 2 == 0 else engines[::-1]:
      if own := found(engine, seed):
        print(f'seed {seed}, {engine}: read from {args.output}')
        rows += own
      else:
        train(engine, args, seed, write)
  return summary.table(rows, folder)


if __name__ == '__main__':
  main()
