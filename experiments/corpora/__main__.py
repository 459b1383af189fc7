"""Builds the corpora: text of Debian's archive, split and checked.

    python -m experiments.corpora debian --out corpora

Apt fetches the files. Elsewhere, give `--from_dir` what `--keep_downloads` left
on a Debian host.
"""

import argparse
import contextlib
import hashlib
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from experiments import common
from experiments.corpora import archive, debian, storage
from specdec_jax.files import replacing
from specdec_jax.files.paths import local_path
from specdec_jax.launch import progress


def main(argv: Sequence[str] | None = None) -> int:
  args = _parser().parse_args(argv)
  return common.finish('corpora', lambda: _build(args))


def _parser() -> argparse.ArgumentParser:
  parser = argparse.ArgumentParser(
    prog='python -m experiments.corpora', description=__doc__.splitlines()[0]
  )
  parser.add_argument('source', choices=['debian'], help='where the text is')
  parser.add_argument('--out', required=True, metavar='DIR', help='new folder')
  parser.add_argument(
    '--only',
    nargs='+',
    choices=list(debian.CORPORA),
    default=list(debian.DEFAULT),
    metavar='CORPUS',
    help=f'some of {", ".join(debian.CORPORA)}; all but the last if not given',
  )
  origin = parser.add_mutually_exclusive_group()
  origin.add_argument(
    '--from_dir', metavar='DIR', help='what --keep_downloads left on some host'
  )
  origin.add_argument(
    '--keep_downloads', metavar='DIR', help="keep the archive's files here"
  )
  parser.add_argument(
    '--overwrite', action='store_true', help='replace an earlier build'
  )
  return parser


def _build(args: argparse.Namespace) -> None:
  out = local_path(args.out)
  packages = debian.packages(args.only)
  with (
    replacing.folder(out, storage.MANIFEST, overwrite=args.overwrite) as folder,
    _archive_folder(args, packages) as downloads,
  ):
    with progress.waiting('checking the archive'):
      files = archive.read(downloads, packages)
    corpora = {}
    for name in debian.CORPORA:
      if name in args.only:
        with progress.waiting(f'building {name}'):
          corpus = debian.build(name, files)
          corpora[name] = storage.write_corpus(folder, name, corpus)
    manifest = storage.write_manifest(folder, files, corpora)
  progress.console().print(_table(out, manifest))
  content = (out / storage.MANIFEST).read_bytes()
  print(f'{storage.MANIFEST}: SHA-256 {hashlib.sha256(content).hexdigest()}')


@contextlib.contextmanager
def _archive_folder(
  args: argparse.Namespace, packages: tuple[str, ...]
) -> Iterator[Path]:
  """Yields the archive's files: given, or downloaded to be kept or not."""
  if args.from_dir:
    yield local_path(args.from_dir)
    return
  with contextlib.ExitStack() as stack:
    folder = args.keep_downloads or stack.enter_context(
      tempfile.TemporaryDirectory(prefix='specdec-')
    )
    with progress.waiting("downloading from Debian's archive"):
      archive.download(local_path(folder), packages)
    yield local_path(folder)


def _table(out: Path, manifest: dict[str, Any]) -> Any:
  """Shows what was built as a `rich` table."""
  from rich.table import Table

  release = manifest['archive']['release']
  table = Table(title=f'{out}: Debian {release.get("version", "")}')
  for name in ('corpus', 'split', 'examples', 'groups', 'words'):
    is_number = name not in ('corpus', 'split')
    table.add_column(name, justify='right' if is_number else 'left')
  for name, corpus in manifest['corpora'].items():
    for split, figures in corpus['splits'].items():
      words = ' + '.join(f'{count:,}' for count in figures['words'].values())
      table.add_row(
        name,
        split,
        f'{figures["examples"]:,}',
        f'{figures["groups"]:,}',
        words,
      )
  return table


if __name__ == '__main__':
  sys.exit(main())
