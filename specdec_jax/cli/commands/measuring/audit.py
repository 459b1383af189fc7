"""Tests whether sampled tokens follow the model, whatever drafts them.

docs/exactness.md says what the figures mean, and how to test another engine.
"""

import argparse
import functools

from specdec_jax.assembly import auditing
from specdec_jax.assembly.sampling import LIMITS
from specdec_jax.audit import audit
from specdec_jax.cli import from_flags, options, outputs
from specdec_jax.launch import compilation_cache, progress
from specdec_jax.sharding import mesh
from specdec_jax.text import prompts


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
  texts = from_flags.texts_alone(prompts.read(args.prompt, args.prompts))
  settings = from_flags.settings(args)
  compilation_cache.enable()
  mesh.check_devices(args.num_devices)
  decoder = chosen.build()
  limits = [x for x in LIMITS if getattr(decoder.sampling, x) is not None]
  if limits and args.dtype != 'float32':
    # A token at the edge of a limit may be drawn in a call of one width and
    # have probability 0 in one of another.
    raise ValueError(
      f'audit compares calls of two widths, and rounding in {args.dtype} moves '
      f'the edge of {limits[0]}: give --dtype float32'
    )
  sample, next_probs = auditing.engine(decoder, texts, settings)
  with progress.waiting('decoding'):
    report = audit(
      sample,
      next_probs,
      [(i,) for i in range(len(texts))],
      num_tokens=args.max_new_tokens,
      num_draws=args.num_draws,
      seeds=range(args.seed, args.seed + args.num_seeds),
      eos_ids=decoder.vocabulary.eos_ids,
    )
  outputs.report(args, report.to_json())
  if args.json != outputs.STANDARD_OUTPUT:
    print(report)
  return int(report.is_rejected)
