"""Tests whether sampled tokens follow the model, whatever drafts them.

docs/exactness.md says what the figures mean, and how to test another engine.
"""

import argparse
import collections
import functools
import math
from collections.abc import Sequence

import numpy as np

from specdec_jax.assembly.text_settings import LIMITS
from specdec_jax.audit import audit
from specdec_jax.audit import decoder_audit as auditing
from specdec_jax.audit.auditing import MAX_PREFIXES
from specdec_jax.cli import from_flags, options, outputs
from specdec_jax.launch import compilation_cache, progress
from specdec_jax.sharding import mesh


def add_arguments(parser: argparse.ArgumentParser) -> None:
  options.add_models(parser)
  options.add_sampling(parser)
  add = options.add_prompts(parser).add_argument
  number = functools.partial(add, type=options.positive_int)
  number('--num_draws', default=2000, help='texts of each prompt per seed')
  number('--num_seeds', default=2, help='from --seed on')
  add('--json', metavar='OUT', help='write all figures; - instead of the table')
  parser.set_defaults(temperature=1.0, max_new_tokens=3, batch_size=64)
  parser.set_defaults(color='never')


def run(args: argparse.Namespace) -> int:
  chosen = from_flags.choices(args)
  if chosen.sampling.is_greedy:
    raise ValueError(
      'audit is of sampled tokens: give a temperature above 0; bench compares '
      'greedy ones'
    )
  outputs.check({'--json': args.json}, from_flags.files_read(args))
  texts = from_flags.texts_alone(from_flags.lines(args))
  settings = from_flags.settings(args)
  compilation_cache.enable()
  mesh.check_devices(args.num_devices)
  decoder = chosen.build()
  limits = [x for x in LIMITS if decoder.sampling.used(x) is not None]
  if limits and args.dtype != 'float32':
    # A token at the edge of a limit may be drawn in a call of one width and
    # have probability 0 in one of another.
    raise ValueError(
      f'audit compares calls of two widths, and rounding in {args.dtype} moves '
      f'the edge of {limits[0]}: give --dtype float32'
    )
  seeds = range(args.seed, args.seed + args.num_seeds)
  ids = [(i,) for i in range(len(texts))]
  # Prompts take turns: of 2 in batches of 64, each has every second row.
  num_rows = args.batch_size // math.gcd(args.batch_size, len(texts))
  with progress.bar('drawing', len(seeds) * args.num_draws * len(texts)) as bar:
    sample, next_probs = auditing.engine(decoder, texts, settings, bar.advance)
    draws = [
      (*prompt, *row)
      for seed in seeds
      for prompt in ids
      for row in sample(prompt, args.num_draws, seed)
    ]
  with progress.bar('comparing', _num_prefixes(draws)) as bar:

    def told(prefix: auditing.Tokens) -> np.ndarray:
      bar.advance(1)
      return next_probs(prefix)

    report = audit(
      sample,
      told,
      ids,
      num_tokens=args.max_new_tokens,
      num_draws=args.num_draws,
      seeds=seeds,
      eos_ids=decoder.vocabulary.eos_ids,
      num_rows=num_rows,
    )
  outputs.report(args, report.to_json())
  if args.json != outputs.STANDARD_OUTPUT:
    progress.show(str(report))
  return int(report.is_rejected)


def _num_prefixes(draws: Sequence[auditing.Tokens]) -> int:
  """Counts what `audit` asks the model for: what comes after each beginning of
  draws, with their prompts before them, but for the rarest."""
  # Of prompt 0 and the draws 5 7 and 5 8 these are 0 and 0 5.
  prefixes = {row[:n] for row in draws for n in range(1, len(row))}
  counts = collections.Counter((row[0], len(row)) for row in prefixes)
  return sum(min(num, MAX_PREFIXES) for num in counts.values())
