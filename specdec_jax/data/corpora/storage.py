"""Corpora in a folder: a JSONL file a split, and a manifest."""

import contextlib
import hashlib
import json
import os
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from specdec_jax.data.corpora import cleaning
from specdec_jax.data.corpora.archive import Archive
from specdec_jax.data.corpora.debian import Corpus

MANIFEST = 'manifest.json'
_FORMAT = 1


@contextlib.contextmanager
def replaced_folder(
  path: Path, mark: str, *, overwrite: bool
) -> Iterator[Path]:
  """A folder to fill, which takes the place of `path` when all went well.

  Args:
    path: of the folder.
    mark: a file that a folder must have to be replaced.
    overwrite: whether it may be.

  Raises:
    ValueError: if `path` is taken, or cannot be written.
  """
  _check_free(path, mark, overwrite=overwrite)
  path = path.absolute()
  partial = path.with_name(f'.{path.name}.partial-{os.getpid()}')
  try:
    partial.mkdir(parents=True)
    yield partial
    if path.exists():
      shutil.rmtree(path)
    partial.rename(path)
  except OSError as error:
    raise ValueError(_unwritten(path, error)) from error
  finally:
    shutil.rmtree(partial, ignore_errors=True)


@contextlib.contextmanager
def replaced_file(path: Path) -> Iterator[Path]:
  """A file to write, which takes the place of `path` when all went well.

  Raises:
    ValueError: if it cannot be written.
  """
  partial = path.with_name(f'.{path.name}.partial-{os.getpid()}')
  try:
    yield partial
    partial.replace(path)
  except OSError as error:
    raise ValueError(_unwritten(path, error)) from error
  finally:
    partial.unlink(missing_ok=True)


def _unwritten(path: Path, error: OSError) -> str:
  reason = error.strerror or error
  return f'cannot write {path}: {reason}; what was there is unchanged'


def _check_free(path: Path, mark: str, *, overwrite: bool) -> None:
  if not path.exists():
    return
  if not path.is_dir():
    raise ValueError(f'{path} is not a folder')
  if not any(path.iterdir()):
    return
  if not (path / mark).exists():
    raise ValueError(f'{path} holds something else: choose another folder')
  if not overwrite:
    raise ValueError(f'{path} exists: add --overwrite to replace it')


def write_corpus(folder: Path, name: str, corpus: Corpus) -> dict[str, Any]:
  """Writes `{name}/{split}.jsonl`; what the manifest says of them."""
  (folder / name).mkdir()
  splits = {}
  for split, examples in corpus.splits.items():
    content = ''.join(
      json.dumps(example, ensure_ascii=False) + '\n' for example in examples
    ).encode('utf-8')
    (folder / name / f'{split}.jsonl').write_bytes(content)
    fields = (
      [field for field in examples[0] if field != 'group'] if (examples) else []
    )
    splits[split] = {
      'examples': len(examples),
      'groups': len({example['group'] for example in examples}),
      'words': {
        field: sum(cleaning.num_words(example[field]) for example in examples)
        for field in fields
      },
      'sha256': hashlib.sha256(content).hexdigest(),
    }
  return {'splits': splits, **corpus.counts}


def write_manifest(
  folder: Path, files: Archive, corpora: Mapping[str, Any]
) -> dict[str, Any]:
  """Writes and returns the manifest: where all came from, and what it is."""
  manifest = {
    'format': _FORMAT,
    'archive': {
      'release': dict(files.release),
      'packages': dict(files.versions),
      'sha256': dict(sorted(files.sha256.items())),
    },
    'corpora': dict(corpora),
  }
  text = json.dumps(manifest, indent=2, ensure_ascii=False) + '\n'
  (folder / MANIFEST).write_text(text, encoding='utf-8')
  return manifest
