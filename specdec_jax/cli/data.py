"""Corpora, vocabularies and token files."""

import argparse
import contextlib
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from specdec_jax.cli import options, progress
from specdec_jax.data.corpora import archive, debian, storage

HELP = 'build corpora, vocabularies and token files'


def add_arguments(parser: argparse.ArgumentParser) -> None:
  actions = parser.add_subparsers(dest='action', required=True)
  for name, (function, text, add) in _ACTIONS.items():
    action = actions.add_parser(
      name,
      help=text.partition(':')[0],
      description=text,
      formatter_class=options.HelpFormatter,
    )
    add(action)
    action.set_defaults(data_action=function)


def run(args: argparse.Namespace) -> int:
  return args.data_action(args)


def _add_build(parser: argparse.ArgumentParser) -> None:
  parser.add_argument('source', choices=['debian'], help='where the text is')
  parser.add_argument('--out', required=True, metavar='DIR', help='new folder')
  parser.add_argument(
    '--only',
    nargs='+',
    choices=list(debian.CORPORA),
    default=list(debian.CORPORA),
    metavar='CORPUS',
    help=f'some of {", ".join(debian.CORPORA)}',
  )
  parser.add_argument(
    '--from_dir', metavar='DIR', help='what --keep_downloads left on some host'
  )
  parser.add_argument(
    '--keep_downloads', metavar='DIR', help="keep the archive's files here"
  )
  parser.add_argument(
    '--overwrite', action='store_true', help='replace an earlier build'
  )


def _build(args: argparse.Namespace) -> int:
  if args.from_dir and args.keep_downloads:
    raise ValueError('--from_dir downloads nothing that could be kept')
  out = Path(args.out)
  packages = debian.packages(args.only)
  with (
    storage.replaced_folder(out, overwrite=args.overwrite) as folder,
    _archive_folder(args, packages) as downloads,
  ):
    with progress.waiting('checking the archive'):
      files = archive.read(downloads, packages)
    corpora = {}
    for name in debian.CORPORA:
      if name in args.only:
        with progress.waiting(f'building {name}'):
          corpus = debian.CORPORA[name](files)
          corpora[name] = storage.write_corpus(folder, name, corpus)
    manifest = storage.write_manifest(folder, files, corpora)
  progress.console().print(_build_table(out, manifest))
  return 0


@contextlib.contextmanager
def _archive_folder(
  args: argparse.Namespace, packages: tuple[str, ...]
) -> Iterator[Path]:
  """The archive's files: given, or downloaded to be kept or not."""
  if args.from_dir:
    yield Path(args.from_dir)
    return
  with contextlib.ExitStack() as stack:
    folder = args.keep_downloads or stack.enter_context(
      tempfile.TemporaryDirectory(prefix='specdec-')
    )
    with progress.waiting("downloading from Debian's archive"):
      archive.download(Path(folder), packages)
    yield Path(folder)


def _build_table(out: Path, manifest: dict[str, Any]) -> Any:
  """What was built, as a `rich` table."""
  from rich.table import Table

  release = manifest['archive']['release']
  table = Table(title=f'{out}: Debian {release.get("version", "")}')
  for name in ('corpus', 'split', 'examples', 'groups', 'words', 'sha256'):
    is_number = name in ('examples', 'groups', 'words')
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
        figures['sha256'][:12],
      )
  return table


_ACTIONS = {
  'build': (_build, 'build corpora: text, divided and checked', _add_build),
}
