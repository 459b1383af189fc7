"""Vocabularies and token files."""

import argparse
import functools
from contextlib import AbstractContextManager
from pathlib import Path

import jax.numpy as jnp

from specdec_jax import lazy
from specdec_jax.assembly.models import Model
from specdec_jax.assembly.text_settings import temperature
from specdec_jax.checkpoints import loading
from specdec_jax.cli import from_flags, options, outputs
from specdec_jax.files import replacing
from specdec_jax.files.paths import user_path
from specdec_jax.launch import compilation_cache, progress
from specdec_jax.launch.numbers import positive_int
from specdec_jax.text import sentencepiece_vocabulary
from specdec_jax.training import recipes
from specdec_jax.training.data import preparation, token_files


def add_arguments(parser: argparse.ArgumentParser) -> None:
  group = parser.add_subparsers(dest='action', metavar='action', required=True)
  for name, (add_options, function) in _ACTIONS.items():
    text = function.__doc__ or ''
    action = group.add_parser(
      name,
      help=text.partition(':')[0],
      description=text,
      formatter_class=options.HelpFormatter,
    )
    add_options(action)
    action.set_defaults(data_action=function)


def run(args: argparse.Namespace) -> int:
  return args.data_action(args)


def _add_vocabulary(parser: argparse.ArgumentParser) -> None:
  needed = functools.partial(parser.add_argument, required=True)
  needed(
    '--inputs',
    nargs='+',
    metavar='PATH',
    help='text files, or folders with a file train.*',
  )
  needed('--out', metavar='MODEL', help='the SentencePiece model to write')
  parser.add_argument(
    '--size', type=positive_int, default=8192, help='number of ids'
  )


def _vocabulary(args: argparse.Namespace) -> int:
  """train a SentencePiece vocabulary: unigrams, pad 0, eos 1, unk 2"""
  inputs = {f'--inputs {path}': path for path in args.inputs}
  outputs.check({'--out': args.out}, inputs)
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
  digest = token_files.sha256_of(model)
  progress.show(f'{args.out}: {args.size} ids, SHA-256 {digest}')
  return 0


def _new_folder(args: argparse.Namespace) -> AbstractContextManager[Path]:
  mark = token_files.DESCRIPTION
  return replacing.folder(args.out, mark, overwrite=args.overwrite)


def _add_prepare(parser: argparse.ArgumentParser) -> None:
  add = parser.add_argument
  needed = functools.partial(add, required=True)
  needed(
    '--inputs',
    nargs='+',
    metavar='PATH',
    help="a corpus's folder, or text files: .jsonl, .tsv, .txt",
  )
  needed('--vocabulary', metavar='MODEL', help='a SentencePiece model')
  needed('--out', metavar='DIR', help='new folder')
  group = parser.add_argument_group('lengths, in tokens with EOS')
  number = functools.partial(group.add_argument, type=positive_int, default=64)
  number('--max_input_tokens', help='maximum length of an input')
  number('--max_target_tokens', help='maximum length of a target, or a text')
  group.add_argument(
    '--too_long',
    choices=['drop', 'trim', 'split'],
    default='drop',
    help='how to treat longer examples',
  )
  add('--prefix', default='', help='prepended to every input')
  add('--overwrite', action='store_true', help='replace earlier token files')


def _prepare(args: argparse.Namespace) -> int:
  """encode text into token files: training reads them with numpy alone"""
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
    # Of counts {'dropped': 3, 'trimmed': 0, ...} only '3 dropped' is shown.
    changed = [name for name in ('dropped', 'trimmed', 'split') if counts[name]]
    figures = (
      f'{counts["examples"]:,} examples of {counts["read"]:,}',
      f'{counts["input_tokens"]:,} + {counts["target_tokens"]:,} tokens',
      *(f'{counts[name]:,} {name}' for name in changed),
    )
    progress.show(f'{args.out}/{split}.npz: {", ".join(figures)}')
  return 0


def _add_writing(parser: argparse.ArgumentParser, *, model: str) -> None:
  """Adds the options that `rewrite` and `write` share."""
  add = parser.add_argument
  add('--model', metavar='MODEL', required=True, help=model)
  add('--out', metavar='DIR', required=True, help='new folder')
  add(
    '--batch_size', type=positive_int, default=64, help='rows decoded at once'
  )
  add('--seed', type=int, default=0, help='random seed of the sampling')
  add('--dtype', **options.DTYPE, help='of weights and caches')


def _add_rewrite(parser: argparse.ArgumentParser) -> None:
  _add_writing(parser, model='a T5, as for generate')
  add = parser.add_argument
  add(
    '--tokens',
    metavar='DIR',
    required=True,
    help='a folder of specdec data prepare',
  )
  add(
    '--splits',
    nargs='+',
    default=['train'],
    metavar='SPLIT',
    help='splits to rewrite; the others are copied',
  )
  add('--temperature', type=temperature, default=0.0, help='0 is greedy')
  add('--overwrite', action='store_true', help='replace an earlier folder')


def _add_write(parser: argparse.ArgumentParser) -> None:
  _add_writing(parser, model='a decoder, as for generate')
  add = parser.add_argument
  add('--prompts', metavar='FILE', required=True, help='as for generate')
  options.add_shared(parser, 'chat', 'system', 'chat_template_kwargs')
  add(
    '--temperature',
    dest='temperatures',
    type=temperature,
    nargs='+',
    default=[0.0],
    help='0 is greedy; several alternate between parts',
  )
  add('--max_new_tokens', type=int, default=256, help='maximum per text')
  add('--part_size', type=int, default=128, help='texts per part')
  add(
    '--layers',
    nargs='+',
    metavar='N',
    type=positive_int,
    help='store the residual streams that enter these layers, in bfloat16; '
    'the number of layers stands for the output of the last one',
  )


def _write(args: argparse.Namespace) -> int:
  """write texts after prompts, with the model's states: to train EAGLE heads.
  The same command resumes after an interruption"""
  if not lazy.is_installed('specdec_jax.infer.examples'):
    raise ValueError(
      'data write reads texts as infer does, and needs the extra infer, whose '
      'folder is not in this installation'
    )
  from specdec_jax.training.data import write_texts

  compilation_cache.enable()
  texts = from_flags.texts_alone(from_flags.lines(args))
  writing = write_texts.Writing(
    prompts=texts,
    how=from_flags.settings(args),
    temperatures=args.temperatures,
    layers=args.layers,
    part_size=args.part_size,
  )
  model = Model(checkpoint=args.model, dtype=args.dtype)
  write_texts.write(model, writing, args.out, say=progress.show)
  return 0


def _rewrite(args: argparse.Namespace) -> int:
  """replace the targets of token files by a model's: for distillation"""
  source = user_path(args.tokens)
  description = token_files.load_description(source)
  splits = {path.stem: path for path in sorted(source.glob('*.npz'))}
  missing = sorted(set(args.splits) - set(splits))
  if missing:
    raise ValueError(f'{source} has no {", ".join(missing)}')
  config, params = recipes.read_t5(args.model, jnp.dtype(args.dtype))
  _check_model_vocabulary(args.model, source)
  length = description.at('lengths').count('targets')
  how = recipes.rewriting(source, length, args.temperature, args.batch_size)
  counts = dict(description.at('splits').values)
  with _new_folder(args) as folder:
    # Copies the vocabulary, and splits that are not rewritten.
    for path in (source / token_files.VOCABULARY, *splits.values()):
      if path.stem not in args.splits and path.is_file():
        (folder / path.name).write_bytes(path.read_bytes())
    for split in args.splits:
      tokens = token_files.load(splits[split])
      file = folder / f'{split}.npz'
      with progress.bar(f'rewriting {split}', len(tokens)) as bar:
        rewritten = recipes.rewrite_targets(
          config, params, tokens, how, seed=args.seed, report=bar.advance
        )
      token_files.save(file, rewritten)
      # The inputs are unchanged, and so are the counts of dropped examples.
      counts[split] = {
        **description.at('splits').at(split).values,
        'target_tokens': rewritten.targets.tokens.size,
        'sha256': token_files.sha256_of(file.read_bytes()),
        'written_by': args.model,
        'temperature': args.temperature,
      }
    token_files.save_description(
      folder, {**description.values, 'splits': counts}
    )
  progress.show(f'{args.out}: targets of {", ".join(args.splits)}')
  return 0


def _check_model_vocabulary(model: str, tokens: Path) -> None:
  """Raises ValueError unless token files have the vocabulary of a model."""
  path = loading.locate(model)
  # The SentencePiece model, even if the model is loaded with tokenizer.json.
  file = path / token_files.VOCABULARY
  vocabulary = loading.read_vocabulary(path)
  if isinstance(vocabulary, sentencepiece_vocabulary.SentencePieceVocabulary):
    token_files.check_vocabulary(tokens, vocabulary.model)
  elif file.is_file():
    token_files.check_vocabulary(tokens, file.read_bytes())


# The docstring of an action is its help.
_ACTIONS = {
  'vocabulary': (_add_vocabulary, _vocabulary),
  'prepare': (_add_prepare, _prepare),
  'rewrite': (_add_rewrite, _rewrite),
  'write': (_add_write, _write),
}
