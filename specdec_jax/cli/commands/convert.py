"""Writes a model in another format, with its sizes and its vocabulary."""

import argparse
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp

from specdec_jax.checkpoints import (
  formats,
  loading,
  model_file,
  stored_arrays,
  t5x,
)
from specdec_jax.cli import options
from specdec_jax.files.paths import is_in_bucket, user_path
from specdec_jax.files.replacing import is_begun, new_folder
from specdec_jax.launch import numbers, progress
from specdec_jax.models import families, layers, quantized
from specdec_jax.sharding import mesh
from specdec_jax.text import vocabulary_files
from specdec_jax.text.vocabularies import AnyVocabulary


def _written() -> dict[str, formats.Format]:
  """Returns the formats that can be written, by name."""
  return {entry.name: entry for entry in formats.FORMATS if entry.write}


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
    type=options.weights,
    metavar='INT',
    help='quantize the matrices: int8, int4, or int4:64 with a scale per 64 '
    'weights (default: leave them unchanged)',
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
    help='number of sentinels after the pieces of --vocabulary (default: from '
    'tokenizer_config.json beside it, else 100 or 0, whichever fits the '
    'embeddings)',
  )
  add(
    '--step',
    type=numbers.count,
    help='N of checkpoint_N; the destination may have other steps (default: '
    'that of the source, else 0)',
  )
  add(
    '--overwrite',
    action='store_true',
    help='replace the destination, or the step of it that is written',
  )


def run(args: argparse.Namespace) -> int:
  if args.extra_ids is not None and args.vocabulary is None:
    raise ValueError('--extra_ids is for --vocabulary')
  bits = quantized.bits_of(args.weights) if args.weights else None
  target_format = _written()[args.to]
  assert target_format.write is not None
  if args.step is not None and target_format.read_step is None:
    raise ValueError(f'--step is for checkpoints of T5X, not --to {args.to}')
  source = loading.locate(args.source)
  loading.warn_of(source, is_converted=True)
  source_format = formats.find(source)
  # Where to write: a step is added to a folder of steps; any other destination
  # is replaced as a whole.
  step = _step(args.step, target_format, source_format, source)
  destination = user_path(args.destination)
  is_added = _has_steps(destination, target_format)
  final = t5x.step_path(destination, step) if is_added else destination
  _check_destination(
    source, final, is_overwritten=args.overwrite, is_step=is_added
  )
  # Read the config, the weights and the vocabularies of the source.
  mesh.check_devices(1)
  with progress.waiting(f'reading {args.source}'):
    dtype = jnp.dtype(args.dtype).type
    config = formats.read_config(source, dtype, args.config)
    if bits and families.only_drafts(config):
      raise ValueError('--weights is for whole models, this one only drafts')
    # Weights that are only rewritten do not need an accelerator.
    with formats.on_host():
      params = formats.read_params(source, config)
      params = quantized.packed(params, bits) if bits else params
    vocabulary = _read_vocabulary(args, source, config)
  draft_vocabulary = None
  draft_vocabulary_path = source / formats.DRAFT_VOCABULARY
  if draft_vocabulary_path.is_file():
    draft_vocabulary = draft_vocabulary_path.read_bytes()
  # Write everything, and say what was written.
  beside = _Beside(config, vocabulary, draft_vocabulary)
  with progress.waiting(f'writing {final}'):
    if is_added:
      assert target_format.add_step is not None
      beside.join(destination)
      target_format.add_step(
        destination, config, params, step, overwrite=args.overwrite
      )
    else:
      with new_folder(destination, overwrite=args.overwrite) as folder:
        beside.write(folder)
        target_format.write(folder, config, params, step)
  leaves = jax.tree.leaves(params)
  progress.show(
    f'wrote {final} ({args.to}): {len(leaves)} arrays, '
    f'{layers.num_params(params):,} parameters, '
    f'{sum(leaf.nbytes for leaf in leaves):,} bytes in '
    f'{quantized.name_of(params) or args.dtype}'
    + ('' if vocabulary else ', without a vocabulary')
  )
  return 0


def _step(
  requested: int | None,
  target_format: formats.Format,
  source_format: formats.Format,
  source: Path,
) -> int:
  """Returns the step to write: --step, else that of the source, else 0."""
  if requested is None and target_format.read_step and source_format.read_step:
    return source_format.read_step(source)
  return requested or 0


def _has_steps(destination: Path, target_format: formats.Format) -> bool:
  """Returns whether a folder holds checkpoints that can get another step."""
  if target_format.add_step is None or not destination.is_dir():
    return False
  existing_format = formats.find_if_any(destination)
  has_steps = (
    existing_format is not None and existing_format.add_step is not None
  )
  # A step itself, `checkpoint_1`, is not a folder of steps.
  return has_steps and t5x.find(destination) != destination


def _read_vocabulary(
  args: argparse.Namespace, source: Path, config: families.AnyConfig
) -> AnyVocabulary | None:
  """Reads --vocabulary, else the source's vocabulary; None if it has none."""
  num_rows = getattr(config, 'vocab_size', None)
  if not families.of(config).has_vocabulary:
    if args.vocabulary is not None:
      raise ValueError(
        f'{args.source} uses the vocabulary of its target: omit --vocabulary'
      )
    return None
  if args.vocabulary is None:
    vocabulary = loading.read_vocabulary(source, num_rows=num_rows)
  else:
    vocabulary = loading.read_other_vocabulary(
      source, config, args.vocabulary, extra_ids=args.extra_ids
    )
  if vocabulary is not None:
    loading.check_vocabulary(args.source, vocabulary, config)
  return vocabulary


class _Beside(NamedTuple):
  """What a folder holds besides parameters: the config, and optionally a
  vocabulary and the file of a draft vocabulary."""

  config: families.AnyConfig
  vocabulary: AnyVocabulary | None
  draft_vocabulary: bytes | None

  def write(self, folder: Path) -> None:
    """Writes the vocabularies; the config is written with the parameters."""
    if self.vocabulary is not None:
      vocabulary_files.write(folder, self.vocabulary)
    if self.draft_vocabulary is not None:
      (folder / formats.DRAFT_VOCABULARY).write_bytes(self.draft_vocabulary)

  def join(self, folder: Path) -> None:
    """Adds what a folder of steps lacks; ValueError if it has different files,
    since all steps share them."""
    for name, is_same in (
      ('network', self._has_same_sizes(folder)),
      ('vocabulary', self._has_same_vocabulary(folder)),
      ('draft vocabulary', self._has_same_draft_vocabulary(folder)),
    ):
      if not is_same:
        raise ValueError(
          f'{folder} has checkpoints with another {name}: name another folder'
        )
    if not (folder / model_file.NAME).exists():
      model_file.write(folder, self.config)
    if self.vocabulary is not None and not vocabulary_files.is_in(folder):
      vocabulary_files.write(folder, self.vocabulary)

  def _has_same_sizes(self, folder: Path) -> bool:
    if not (folder / model_file.NAME).exists():
      return True
    # Each step has dtypes of its own.
    existing = model_file.read(folder, dtype=self.config.dtype)
    return existing == self.config

  def _has_same_vocabulary(self, folder: Path) -> bool:
    if self.vocabulary is None or not vocabulary_files.is_in(folder):
      return True
    num_rows = getattr(self.config, 'vocab_size', None)
    existing = vocabulary_files.read(folder, num_rows=num_rows)
    vocabulary = self.vocabulary
    return (existing.tokens(), existing.eos_ids) == (
      vocabulary.tokens(),
      vocabulary.eos_ids,
    )

  def _has_same_draft_vocabulary(self, folder: Path) -> bool:
    path = folder / formats.DRAFT_VOCABULARY
    existing = path.read_bytes() if path.is_file() else None
    return existing == self.draft_vocabulary


def _check_destination(
  source: Path, destination: Path, *, is_overwritten: bool, is_step: bool
) -> None:
  """Raises ValueError if `destination` cannot be written, before the source is
  read. `is_step`: it is one of several steps in a folder."""
  # Neither 'models/a' to 'models', nor 'models' to 'models/a'.
  inner, outer = source.resolve(), destination.resolve()
  if inner.is_relative_to(outer) or outer.is_relative_to(inner):
    raise ValueError(
      f'cannot write {destination}: it is, holds or lies in {source}'
    )
  # In a bucket, a folder exists once something is in it.
  if not is_in_bucket(destination) and not destination.parent.is_dir():
    raise ValueError(
      f'cannot write {destination}: there is no folder {destination.parent}'
    )
  if destination.exists() and not is_begun(destination):
    if not is_overwritten:
      raise ValueError(f'{destination} already exists; --overwrite replaces it')
    if not is_step:
      _check_is_model(destination)


def _check_is_model(destination: Path) -> None:
  """Raises unless the folder holds only files that `convert` writes."""
  children = list(destination.iterdir()) if destination.is_dir() else []
  written_formats = _written().values()
  marks = {file_format.files[0] for file_format in written_formats}
  if not any(child.name in marks or _is_part(child) for child in children):
    raise ValueError(
      f'{destination} holds no model, so --overwrite does not replace it'
    )
  steps = sorted(child.name for child in children if t5x.layout_of(child))
  if len(steps) > 1:
    raise ValueError(
      f'{destination} holds {stored_arrays.some(steps)}, which --overwrite '
      'does not replace together: name another folder'
    )
  # Files of all formats count: a folder in another format may be replaced.
  names = {
    name for file_format in written_formats for name in file_format.files
  }
  names.update((*vocabulary_files.WRITTEN, formats.DRAFT_VOCABULARY))
  is_model_file = lambda child: child.is_file() and child.name in names
  foreign = sorted(
    child.name
    for child in children
    if not _is_part(child) and not is_model_file(child)
  )
  if foreign:
    raise ValueError(
      f'{destination} holds {stored_arrays.some(foreign)} besides a model: '
      'move it away, or name another folder'
    )


def _is_part(child: Path) -> bool:
  return child.is_dir() and any(x.is_part(child) for x in _written().values())
