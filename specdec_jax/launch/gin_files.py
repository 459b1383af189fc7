"""Finding gin files by name: the user's own, and those of this package."""

import contextlib
import importlib.util
import io
import itertools
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import NamedTuple, TextIO

from specdec_jax.files.paths import is_in_bucket, user_path
from specdec_jax.launch.spelling import did_you_mean

_SHIPPED = 'gin_configs'
# Packages that users' gin files may import by an earlier name.
_MOVED = {'specdec_jax.data': 'specdec_jax.training.data'}
# Inside the package in a wheel, else beside it.
_INSIDE = Path(__file__).resolve().parents[1] / _SHIPPED
_BESIDE = _INSIDE.parent.parent / _SHIPPED
SHIPPED = (_INSIDE if _INSIDE.is_dir() else _BESIDE).resolve()


def shipped_names() -> list[str]:
  """Lists the gin files of this package by name, such as `runs/infer.gin`."""
  paths = sorted(SHIPPED.rglob('*.gin'))
  return [path.relative_to(SHIPPED).as_posix() for path in paths]


def shipped_text(name: str) -> str:
  return (SHIPPED / name).read_text(encoding='utf-8')


class Dialect(NamedTuple):
  """How gin files and bindings of another project are read as ours.

  Attributes:
    stand_in: from a file's name to the text that replaces it; None for none.
    translate: from a file's text to one in our names.
    rename: from bindings of the command line to those in our names.
  """

  stand_in: Callable[[str], str | None] = lambda name: None
  translate: Callable[[str], str] = lambda text: text
  rename: Callable[[Sequence[str]], list[str]] = list


OWN = Dialect()


def reader(
  folders: Sequence[str], *, remote_imports: bool, dialect: Dialect = OWN
) -> Callable[[str], AbstractContextManager[TextIO]]:
  """Returns a function that opens the files of one configuration by name.

  `folders` go before the files of this package; those include only each other.
  A file in a bucket that imports a module, by which it can call any function,
  is a ValueError unless `remote_imports`.
  """
  # The files that are being read, each included by the one before it.
  opened: list[Path] = []

  @contextlib.contextmanager
  def read(name: str) -> Iterator[TextIO]:
    is_shipped = bool(opened) and opened[-1].is_relative_to(SHIPPED)
    text = dialect.stand_in(name)
    path = SHIPPED / 't5x' / Path(name).name
    if text is None:
      path = find(name, () if is_shipped else folders)
    if path in opened:
      hint = ''
      if (SHIPPED / name).is_file():
        hint = f': that of this package is {_SHIPPED}/{name}'
      raise ValueError(f'{path} includes itself{hint}')
    opened.append(path)
    text = path.read_text(encoding='utf-8') if text is None else text
    is_trusted = remote_imports or not is_in_bucket(path)
    if not is_trusted and re.search(r'^\s*(import|from)\b', text, re.MULTILINE):
      raise ValueError(
        f'{path} imports modules, so that anyone who can write to the bucket '
        'can run code here: copy it to a disk, or add --gin_remote_imports'
      )
    file = io.StringIO(_with_current_modules(dialect.translate(text)))
    file.name = str(path)  # type: ignore[attr-defined]  # For gin's messages.
    yield file
    opened.pop()

  return read


def _with_current_modules(text: str) -> str:
  """Rewrites imports of modules by earlier names, in the text of a gin file."""
  for earlier, current in _MOVED.items():
    text = re.sub(
      rf'^(\s*(?:from|import)\s+){re.escape(earlier)}\b',
      rf'\g<1>{current}',
      text,
      flags=re.MULTILINE,
    )
  return text


def find(name: str, folders: Sequence[str]) -> Path:
  """Finds a file by its name in these folders, this package (also as
  `gin_configs/NAME`), or a Python package; else ValueError, with similar names.
  """
  path = user_path(name)
  places = [*dict.fromkeys(user_path(folder).resolve() for folder in folders)]
  is_prefixed = path.parts[:1] == (_SHIPPED,)
  shipped = path.relative_to(_SHIPPED) if is_prefixed else path
  candidates = [place / path for place in places] + [SHIPPED / shipped]
  if is_in_bucket(path):
    candidates = [path]
  # Python packages come last: search paths have precedence.
  for candidate in itertools.chain(candidates, _in_packages(path)):
    if candidate.is_file():
      return candidate.resolve()
  searched = ', '.join(map(str, [*places, SHIPPED]))
  where = '' if path.is_absolute() else f' in {searched}'
  raise ValueError(f'no file {name}{where}{_hint(path, shipped, candidates)}')


def _in_packages(path: Path) -> Iterator[Path]:
  with contextlib.suppress(ImportError, ValueError):
    top, *rest = path.parts
    # Only the outermost package is searched for: finding a package within it
    # would import it.
    spec = importlib.util.find_spec(top) if top.isidentifier() else None
    for location in (spec and spec.submodule_search_locations) or ():
      yield Path(location, *rest)


def _hint(path: Path, shipped: Path, candidates: Sequence[Path]) -> str:
  """Suggests names for a missing file, or lists the files in its folder."""
  beside = dict.fromkeys(
    str(path.parent / file.name)
    for candidate in candidates
    for file in sorted(candidate.parent.glob('*.gin'))
  )
  names = list(dict.fromkeys([*beside, *shipped_names()]))
  near = [name for name in names if Path(name).stem in (path.stem, path.name)]
  if near:
    return f'; did you mean {" or ".join(near)}?'
  existing = f'; there are {", ".join(beside)}' if beside else ''
  return did_you_mean(str(shipped), names, most=3, cutoff=0.85) or existing
