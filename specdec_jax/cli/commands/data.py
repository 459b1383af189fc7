"""Vocabularies and token files."""

import argparse
import functools
import hashlib
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import jax.numpy as jnp

from specdec_jax.assembly.models import Model
from specdec_jax.checkpoints import loading
from specdec_jax.cli import options, outputs
from specdec_jax.data import preparation, token_files
from specdec_jax.files import replacing
from specdec_jax.files.paths import user_path
from specdec_jax.infer import rewriting
from specdec_jax.launch import compilation_cache, progress
from specdec_jax.text import prompts, sentencepiece_vocabulary
from specdec_jax.training import recipes


def add_arguments(parser: argparse.ArgumentParser) -> None:
  actions = parser.add_subparsers(
    dest='action', metavar='action', required=True
  )
  for name, (add_options, function) in _ACTIONS.items():
    text = function.__doc__ or ''
    action = actions.add_parser(
      name,
      help=text.partition(':')[0],
      description=text,
      formatter_class=options.HelpFormatter,
    )
    add_options(action)
    action.set_defaults(data_action=function)
  # Whatever options it had are text here: the answer is the same.
  moved = actions.add_parser('build', add_help=False, prefix_chars='\n')
  moved.add_argument('rest', nargs='*')
  moved.set_defaults(data_action=_build)


def run(args: argparse.Namespace) -> int:
  return args.data_action(args)


def _build(args: argparse.Namespace) -> int:
  raise ValueError(
    'specdec data build has moved: give python -m experiments.corpora debian '
    '--out DIR in a checkout of the repository'
  )


def _add_vocabulary(parser: argparse.ArgumentParser) -> None:
  needed = functools.partial(parser.add_argument, required=True)
  needed(
    '--inputs',
    nargs='+',
    metavar='PATH',
    help="text files, or corpora's folders, of which train.* is read",
  )
  needed('--out', metavar='MODEL', help='the SentencePiece model to write')
  parser.add_argument(
    '--size', type=options.positive_int, default=8192, help='number of ids'
  )


def _vocabulary(args: argparse.Namespace) -> int:
  """train a SentencePiece vocabulary: unigrams, pad 0, eos 1, unk 2"""
  outputs.check(
    {'--out': args.out}, {f'--inputs {path}': path for path in args.inputs}
  )
  files = []
  for path in map(user_path, args.inputs):
    sources = preparation.find(path)
    if path.is_dir() and 'train' not in sources:
      raise ValueError(f'{path} has no train split')
    files.append(sources['train'] if path.is_dir() else path)
  with progress.waiting(f'training a vocabulary of {args.size}'):
    # The trainer answers an interrupt only when it is done.
    texts, train = preparation.texts(files), sentencepiece_vocabulary.train
    model = progress.interruptible(lambda: train(texts, size=args.size))
  with replacing.file(user_path(args.out)) as partial:
    partial.write_bytes(model)
  digest = hashlib.sha256(model).hexdigest()
  print(f'{args.out}: {args.size} ids, SHA-256 {digest}')
  return 0


def _new_folder(args: argparse.Namespace) -> AbstractContextManager[Path]:
  return replacing.folder(
    user_path(args.out), token_files.DESCRIPTION, overwrite=args.overwrite
  )


def _add_prepare(parser: argparse.ArgumentParser) -> None:
  add = parser.add_argument
  needed = functools.partial(add, required=True)
  needed(
    '--inputs',
    nargs='+',
    metavar='PATH',
    help="a corpus's folder, or text files: .jsonl, .tsv, .txt",
  )
  needed(
    '--vocabulary',
    metavar='MODEL',
    help='a SentencePiece model; it is copied beside the token files, from '
    'where specdec train takes it',
  )
  needed('--out', metavar='DIR', help='new folder')
  lengths = parser.add_argument_group('lengths, in tokens with EOS')
  number = functools.partial(
    lengths.add_argument, type=options.positive_int, default=64
  )
  number('--max_input_tokens', help='most of an input')
  number('--max_target_tokens', help='most of a target, or of a text')
  lengths.add_argument(
    '--too_long',
    choices=['drop', 'trim', 'split'],
    default='drop',
    help='what becomes of longer examples',
  )
  add('--prefix', default='', help='put before every input')
  add('--overwrite', action='store_true', help='replace earlier token files')


def _prepare(args: argparse.Namespace) -> int:
  """encode text into token files: training then needs numpy alone"""
  sources: dict[str, Path] = {}
  for path in args.inputs:
    for split, file in preparation.find(user_path(path)).items():
      if split in sources:
        raise ValueError(
          f'{sources[split]} and {file} would both be the token file {split}'
        )
      sources[split] = file
  lengths = preparation.Lengths(
    inputs=args.max_input_tokens,
    targets=args.max_target_tokens,
    too_long=args.too_long,
  )
  with _new_folder(args) as folder, progress.waiting('encoding'):
    description = preparation.prepare(
      folder, sources, user_path(args.vocabulary), lengths, prefix=args.prefix
    )
  for split, counts in description['splits'].items():
    lost = [name for name in ('dropped', 'trimmed', 'split') if counts[name]]
    figures = (
      f'{counts["examples"]:,} examples of {counts["read"]:,}',
      f'{counts["input_tokens"]:,} + {counts["target_tokens"]:,} tokens',
      *(f'{counts[name]:,} {name}' for name in lost),
    )
    print(f'{args.out}/{split}.npz: {", ".join(figures)}')
  return 0


# Options of `rewrite` that one source alone takes, with their defaults.
_WITH_TOKENS: dict[str, Any] = {'splits': ['train'], 'overwrite': False}
_WITH_PROMPTS: dict[str, Any] = {
  'chat': False,
  'system': None,
  'max_new_tokens': 256,
  'part_size': 128,
  'layers': None,
}


def _add_rewrite(parser: argparse.ArgumentParser) -> None:
  add = parser.add_argument
  needed = functools.partial(add, required=True)
  needed(
    '--model',
    metavar='MODEL',
    help='as for generate: a T5 for --tokens, a decoder for --prompts',
  )
  source = parser.add_mutually_exclusive_group(required=True)
  source.add_argument(
    '--tokens',
    metavar='DIR',
    help='what specdec data prepare wrote: inputs, and targets to be replaced',
  )
  source.add_argument(
    '--prompts',
    metavar='FILE',
    help='one prompt per line, or JSONL with a key "prompt": texts are written '
    'after them, in parts; the same command goes on where it was stopped',
  )
  needed('--out', metavar='DIR', help='new folder')
  add(
    '--temperature',
    type=options.temperature,
    nargs='+',
    default=[0.0],
    help='0 is greedy; with --prompts, parts take several in turn',
  )
  number = functools.partial(add, type=options.positive_int)
  number('--batch_size', default=64, help='rows decoded at once')
  add('--seed', type=options.seed, default=0, help='of draws')
  add('--dtype', **options.DTYPE, help='of weights and caches')
  _add_rewriting_of_tokens(parser)
  _add_writing_after_prompts(parser)


def _add_rewriting_of_tokens(parser: argparse.ArgumentParser) -> None:
  add = parser.add_argument_group('with --tokens').add_argument
  add(
    '--splits',
    nargs='+',
    default=_WITH_TOKENS['splits'],
    metavar='SPLIT',
    help='to be rewritten; the others are copied',
  )
  add('--overwrite', action='store_true', help='replace an earlier folder')


def _add_writing_after_prompts(parser: argparse.ArgumentParser) -> None:
  add = parser.add_argument_group('with --prompts').add_argument
  options.add_chat(add)
  number = functools.partial(add, type=options.positive_int)
  defaults = _WITH_PROMPTS
  number(
    '--max_new_tokens', default=defaults['max_new_tokens'], help='per text'
  )
  number('--part_size', default=defaults['part_size'], help='texts of a part')
  add(
    '--layers',
    nargs='+',
    type=options.positive_int,
    metavar='N',
    help='keep the residual streams that enter these layers, in bfloat16; the '
    "number of layers names the last one's output",
  )


def _rewrite(args: argparse.Namespace) -> int:
  """give token files, or prompts, the texts that a model writes: distillation
  and EAGLE heads need them"""
  _check_source(args)
  if args.prompts is not None:
    return _write_after_prompts(args)
  if len(args.temperature) != 1:
    raise ValueError(
      f'--tokens takes one --temperature, got {len(args.temperature)}'
    )
  return _rewrite_tokens(args)


def _check_source(args: argparse.Namespace) -> None:
  """Raises ValueError for an option of the other source."""
  given, other, foreign = 'tokens', 'prompts', _WITH_PROMPTS
  if args.prompts is not None:
    given, other, foreign = 'prompts', 'tokens', _WITH_TOKENS
  for name, default in foreign.items():
    if getattr(args, name) != default:
      raise ValueError(f'--{name} is for --{other}, not for --{given}')


def _write_after_prompts(args: argparse.Namespace) -> int:
  if args.system is not None and not args.chat:
    raise ValueError('--system is for --chat, which is not given')
  compilation_cache.enable()
  writing = rewriting.Writing(
    prompts=prompts.read(None, args.prompts),
    is_chat=args.chat,
    system=args.system,
    max_new_tokens=args.max_new_tokens,
    temperatures=args.temperature,
    layers=args.layers,
    batch_size=args.batch_size,
    part_size=args.part_size,
    seed=args.seed,
  )
  model = Model(checkpoint=args.model, dtype=args.dtype)
  rewriting.write(
    model, writing, args.out, say=functools.partial(print, flush=True)
  )
  return 0


def _rewrite_tokens(args: argparse.Namespace) -> int:
  source = user_path(args.tokens)
  description = token_files.load_description(source)
  splits = {path.stem: path for path in sorted(source.glob('*.npz'))}
  if missing := sorted(set(args.splits) - set(splits)):
    raise ValueError(f'{source} has no {", ".join(missing)}')
  config, params = recipes.read_t5(args.model, jnp.dtype(args.dtype))
  path = loading.locate(args.model)
  vocabulary = loading.read_vocabulary(path)
  own = path / token_files.VOCABULARY  # Also where tokenizer.json is read.
  model = getattr(vocabulary, 'model', own.is_file() and own.read_bytes())
  if isinstance(model, bytes):
    token_files.check_vocabulary(description, hashlib.sha256(model).hexdigest())
  with _new_folder(args) as folder:
    words = source / token_files.VOCABULARY
    if words.is_file():
      (folder / words.name).write_bytes(words.read_bytes())
    for split, path in splits.items():
      if split not in args.splits:
        (folder / path.name).write_bytes(path.read_bytes())
        continue
      tokens = token_files.load(path)
      with progress.bar(f'rewriting {split}', len(tokens)) as bar:
        rewritten = recipes.rewrite_targets(
          config,
          params,
          tokens,
          max_new_tokens=description['lengths']['targets'],
          eos_id=description['vocabulary']['eos_id'],
          vocab_size=description['vocabulary']['size'],
          temperature=args.temperature[0],
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
        'temperature': args.temperature[0],
      }
    token_files.save_description(folder, description)
  progress.console().print(f'{args.out}: targets of {", ".join(args.splits)}')
  return 0


# The docstring of an action is its help.
_ACTIONS = {
  'vocabulary': (_add_vocabulary, _vocabulary),
  'prepare': (_add_prepare, _prepare),
  'rewrite': (_add_rewrite, _rewrite),
}
