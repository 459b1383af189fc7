"""`specdec data rewrite`: token files with the targets that a model gives."""

import argparse
import hashlib
import json
import shutil
from pathlib import Path

import jax.numpy as jnp

from specdec_jax.checkpoints import loading
from specdec_jax.cli import options
from specdec_jax.data import token_files
from specdec_jax.files import replacing
from specdec_jax.files.local_path import local_path
from specdec_jax.launch import progress
from specdec_jax.models import presets
from specdec_jax.training import distillation, recipes


def add_arguments(parser: argparse.ArgumentParser) -> None:
  parser.add_argument(
    '--model', required=True, metavar='MODEL', help='a T5, as for generate'
  )
  parser.add_argument(
    '--tokens',
    required=True,
    metavar='DIR',
    help='what specdec data prepare wrote',
  )
  parser.add_argument('--out', required=True, metavar='DIR', help='new folder')
  parser.add_argument(
    '--splits',
    nargs='+',
    default=['train'],
    metavar='SPLIT',
    help='to be rewritten; the others are copied',
  )
  parser.add_argument(
    '--temperature', type=options.temperature, default=0.0, help='0 is greedy'
  )
  parser.add_argument(
    '--batch_size',
    type=options.positive_int,
    default=64,
    help='rows decoded at once',
  )
  parser.add_argument('--seed', type=options.seed, default=0, help='of draws')
  parser.add_argument(
    '--dtype',
    choices=presets.DTYPES,
    default='float32',
    help='of weights and caches',
  )
  parser.add_argument(
    '--overwrite', action='store_true', help='replace an earlier folder'
  )


def run(args: argparse.Namespace) -> int:
  source = local_path(args.tokens)
  description = token_files.load_description(source)
  splits = {path.stem: path for path in sorted(source.glob('*.npz'))}
  if missing := sorted(set(args.splits) - set(splits)):
    raise ValueError(f'{source} has no {", ".join(missing)}')
  config, params = recipes.read_t5(args.model, jnp.dtype(args.dtype))
  vocabulary = loading.read_vocabulary(loading.locate(args.model))
  model = getattr(vocabulary, 'model', None)
  if isinstance(model, bytes):
    token_files.check_vocabulary(description, hashlib.sha256(model).hexdigest())
  with replacing.folder(
    Path(args.out), token_files.DESCRIPTION, overwrite=args.overwrite
  ) as folder:
    if (source / token_files.VOCABULARY).is_file():
      shutil.copy(source / token_files.VOCABULARY, folder)
    for split, path in splits.items():
      if split not in args.splits:
        shutil.copy(path, folder / path.name)
        continue
      tokens = token_files.load(path)
      with progress.bar(f'rewriting {split}', len(tokens)) as bar:
        rewritten = distillation.rewrite_targets(
          config,
          params,
          tokens,
          max_new_tokens=description['lengths']['targets'],
          eos_id=description['vocabulary']['eos_id'],
          vocab_size=description['vocabulary']['size'],
          temperature=args.temperature,
          batch_size=args.batch_size,
          seed=args.seed,
          report=bar.advance,
        )
      token_files.save(folder / path.name, rewritten)
      checksum = hashlib.sha256((folder / path.name).read_bytes()).hexdigest()
      description['splits'][split] |= {
        'target_tokens': rewritten.targets.size,
        'sha256': checksum,
        'written_by': args.model,
        'temperature': args.temperature,
      }
    text = json.dumps(description, indent=2, ensure_ascii=False) + '\n'
    (folder / token_files.DESCRIPTION).write_text(text, encoding='utf-8')
  progress.console().print(f'{args.out}: targets of {", ".join(args.splits)}')
  return 0
