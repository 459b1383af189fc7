"""Writes a model in another format, with its sizes and its vocabulary."""

import argparse
from pathlib import Path

import jax
import jax.numpy as jnp

from specdec_jax.checkpoints import formats, loading, stored_arrays
from specdec_jax.cli import options
from specdec_jax.files.paths import is_in_bucket, user_path
from specdec_jax.files.replacing import is_begun, new_folder
from specdec_jax.launch import numbers, progress
from specdec_jax.models import families, layers, quantized
from specdec_jax.sharding import mesh
from specdec_jax.text import vocabulary_files


def _written() -> dict[str, formats.Format]:
  return {each.name: each for each in formats.FORMATS if each.write}


def add_arguments(parser: argparse.ArgumentParser) -> None:
  add = parser.add_argument
  add(
    'source',
    help='a T5X checkpoint, a Hugging Face folder, a .gguf file, what train or '
    'convert wrote, or hf:organisation/name, also with @revision',
  )
  add('destination', help='the folder to make')
  add('--to', choices=tuple(_written()), required=True, help='the format')
  add('--dtype', **options.DTYPE, help='of the weights')
  add(
    '--weights',
    metavar='INT',
    help='int8, int4, or int4:64 with a scale for each 64 weights: pack the '
    'matrices of a model (default: as they are)',
  )
  add('--config', metavar='SIZES', help=options.SIZES)
  add(
    '--vocabulary',
    metavar='FILE',
    help='the SentencePiece model to write (default: that of the source)',
  )
  add(
    '--extra_ids',
    type=numbers.count,
    help='sentinels after the pieces of --vocabulary (default: what '
    'tokenizer_config.json beside it says, else 100, or 0 if the pieces fill '
    'the embeddings)',
  )
  add(
    '--step',
    type=numbers.count,
    help='N of checkpoint_N (default: that of the source, else 0)',
  )
  add('--overwrite', action='store_true', help='replace the destination')


def run(args: argparse.Namespace) -> int:
  if args.extra_ids is not None and args.vocabulary is None:
    raise ValueError('--extra_ids is for --vocabulary')
  bits = quantized.bits_of(args.weights) if args.weights else None
  written = _written()[args.to]
  assert written.write is not None
  if args.step is not None and written.read_step is None:
    raise ValueError(f'--step is for checkpoints of T5X, not --to {args.to}')
  source = loading.locate(args.source)
  loading.warn_of(source, is_converted=True)
  destination = user_path(args.destination)
  _check_destination(source, destination, is_overwritten=args.overwrite)
  mesh.check_devices(1)
  with progress.waiting(f'reading {args.source}'):
    found = formats.find(source)
    dtype = jnp.dtype(args.dtype).type
    config = formats.read_config(source, dtype, args.config)
    if bits and families.only_drafts(config):
      raise ValueError('--weights is for whole models, this one only drafts')
    # What is only written has no need of an accelerator.
    with formats.on_host():
      params = formats.read_params(source, config)
      params = quantized.packed(params, bits) if bits else params
    num_rows = getattr(config, 'vocab_size', None)
    vocabulary = None
    if not families.of(config).has_vocabulary:
      if args.vocabulary is not None:
        raise ValueError(
          f'{args.source} has the vocabulary of its target: give none'
        )
    elif args.vocabulary is None:
      vocabulary = loading.read_vocabulary(source, num_rows=num_rows)
    else:
      vocabulary = vocabulary_files.read(
        args.vocabulary, extra_ids=args.extra_ids, num_rows=num_rows
      )
  if vocabulary is not None:
    loading.check_vocabulary(args.source, vocabulary, config)
  step = args.step or 0
  if args.step is None and written.read_step and found.read_step:
    step = found.read_step(source)
  with (
    progress.waiting(f'writing {destination}'),
    new_folder(destination, overwrite=args.overwrite) as folder,
  ):
    if vocabulary is not None:
      vocabulary_files.write(folder, vocabulary)
    if (own := source / formats.DRAFT_VOCABULARY).is_file():
      (folder / own.name).write_bytes(own.read_bytes())
    written.write(folder, config, params, step)
  leaves = jax.tree.leaves(params)
  progress.show(
    f'wrote {destination} ({args.to}): {len(leaves)} arrays, '
    f'{layers.num_params(params):,} parameters, '
    f'{sum(leaf.nbytes for leaf in leaves):,} bytes in '
    f'{args.weights or args.dtype}'
    + ('' if vocabulary else ', without a vocabulary')
  )
  return 0


def _check_destination(
  source: Path, destination: Path, *, is_overwritten: bool
) -> None:
  """Raises ValueError if `destination` cannot be written, before the source is
  read."""
  # Neither 'models/a' to 'models', nor 'models' to 'models/a'.
  inner, outer = source.resolve(), destination.resolve()
  if inner.is_relative_to(outer) or outer.is_relative_to(inner):
    raise ValueError(
      f'cannot write {destination}: it is, holds or lies in {source}'
    )
  # In a bucket, a folder is there when something lies in it.
  if not is_in_bucket(destination) and not destination.parent.is_dir():
    raise ValueError(
      f'cannot write {destination}: there is no folder {destination.parent}'
    )
  if destination.exists() and not is_begun(destination):
    if not is_overwritten:
      raise ValueError(f'{destination} already exists; --overwrite replaces it')
    _check_is_model(destination)


def _check_is_model(destination: Path) -> None:
  """Raises unless the folder holds only files that `convert` writes."""
  children = list(destination.iterdir()) if destination.is_dir() else []
  written = _written().values()
  marks = {each.files[0] for each in written}
  if not any(child.name in marks or _is_part(child) for child in children):
    raise ValueError(
      f'{destination} holds no model, so --overwrite does not replace it'
    )
  # Files of any format: a folder in another format may be replaced, too.
  names = {name for each in written for name in each.files}
  names.update((*vocabulary_files.WRITTEN, formats.DRAFT_VOCABULARY))
  known = lambda child: child.is_file() and child.name in names
  is_other = lambda child: not (_is_part(child) or known(child))
  if others := sorted(child.name for child in children if is_other(child)):
    raise ValueError(
      f'{destination} holds {stored_arrays.some(others)} besides a model: '
      'move that away, or name another folder'
    )


def _is_part(child: Path) -> bool:
  return child.is_dir() and any(x.is_part(child) for x in _written().values())
