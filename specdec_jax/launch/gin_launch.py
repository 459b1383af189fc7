"""Launches a function from gin files, with T5X's flags; nothing else knows of
gin (https://github.com/google/gin-config)."""

import argparse
import contextlib
import functools
import os
import re
import sys
import tokenize
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple, TextIO

from specdec_jax.files.require import require
from specdec_jax.launch import agreement, gin_files, gin_types
from specdec_jax.launch.gin_files import Dialect
from specdec_jax.launch.spelling import did_you_mean

_import_gin = functools.partial(
  require, 'gin', extra='infer', purpose='a gin file'
)
_BINDING = '--gin.'
_REQUIRED = '%gin.REQUIRED'
# Name, value and comment of a macro in a gin file.
_MACRO = re.compile(r'^([A-Z_]+) = (.*?)(?:  # (.*))?$', re.MULTILINE)


class Configuration(NamedTuple):
  """A configuration by gin.

  Attributes:
    files: gin files, in their order.
    bindings: those of the command line, which override the files'.
    folders: where files are looked for.
    remote_imports: whether files in buckets may import modules.
    dialect: that of another project, if files and bindings are in it.
  """

  files: Sequence[str] = ()
  bindings: Sequence[str] = ()
  folders: Sequence[str] = ()
  remote_imports: bool = False
  dialect: Dialect = gin_files.OWN


def add_arguments(
  parser: argparse.ArgumentParser, files: Sequence[str] = ()
) -> None:
  """Adds the flags. The help lists the macros of `files` of this package, each
  with the comment of the first file that has it."""
  add = parser.add_argument_group('gin').add_argument
  add(
    '--gin_file',
    action='append',
    default=[],
    metavar='FILE',
    help='a path, or the name of a file of this package, such as '
    'runs/infer.gin; may be repeated; later files override earlier ones. It '
    'can import and call any code as soon as it is read',
  )
  add(
    '--gin_remote_imports',
    action='store_true',
    help='let gin files in buckets import modules',
  )
  add(
    '--gin_bindings',
    action='append',
    default=[],
    metavar='NAME=VALUE',
    help='one binding, after all files; --gin.NAME=VALUE is the same. Texts '
    'are quoted: --gin.NAME=\'"text"\'',
  )
  add(
    '--gin_search_paths',
    default='.',
    metavar='DIR,...',
    help='where --gin_file and includes are looked for after the working '
    'directory and before the files of this package',
  )
  listed = set()
  for file in files:
    shown = parser.add_argument_group(f'macros of {file}, as --gin.NAME=VALUE')
    for name, value, comment in _MACRO.findall(gin_files.shipped_text(file)):
      if name not in listed:
        default = '' if value == _REQUIRED else f' (default: {value})'
        # For the help alone: `expand` lets none of them through.
        shown.add_argument(
          f'{_BINDING}{name}',
          metavar='VALUE',
          default=argparse.SUPPRESS,
          help=(comment + default).replace('%', '%%'),
        )
        listed.add(name)


def expand(argv: Sequence[str]) -> list[str]:
  """Rewrites `--gin.NAME=VALUE` for argparse; ValueError without a value."""
  expanded = []
  for flag in argv:
    if flag.startswith(_BINDING):
      name, equals, _ = flag.partition('=')
      if not equals:
        raise ValueError(f'{flag} has no value: write {name}=VALUE')
      flag = '--gin_bindings=' + flag.removeprefix(_BINDING)
    expanded.append(flag)
  return expanded


def given(args: argparse.Namespace, dialect: Dialect) -> Configuration:
  """Returns what the flags of `add_arguments` say."""
  return Configuration(
    files=args.gin_file,
    bindings=args.gin_bindings,
    folders=args.gin_search_paths.split(','),
    remote_imports=args.gin_remote_imports,
    dialect=dialect,
  )


def call(
  function: Callable[..., Any],
  configuration: Configuration,
  *,
  may_differ: tuple[str, ...] = (),
  **arguments: object,
) -> Any:
  """Calls a function with `arguments`, and others as gin binds them.

  ValueError as of `parse`, if no file configures it, or if processes differ in
  a binding or value whose name does not end in `may_differ`.
  """
  parse(configuration)
  # What is bound by code counts as what a file binds; functions are the same.
  values = {k: repr(v) for k, v in arguments.items() if not callable(v)}
  agreement.check_everywhere(
    {
      name: value
      for name, value in {**bindings(), **values}.items()
      if not name.endswith(may_differ)
    }
  )
  try:
    configured = _import_gin().get_configurable(function)
  except ValueError as error:
    name = function.__name__
    raise ValueError(
      f'no gin file configures {name}: give --gin_file=runs/{name}.gin'
    ) from error
  try:
    return configured(**arguments)
  except Exception as error:
    original = _original(error)
    raise original from original.__cause__


def parse(configuration: Configuration) -> None:
  """Reads a configuration; ValueError if a part of it is missing or wrong."""
  gin = _import_gin()
  gin.clear_config(clear_constants=True)
  bindings.cache_clear()
  # Files import modules that lie there, as they do under `python -m`.
  if (here := os.getcwd()) not in sys.path:
    sys.path.append(here)
  read = gin_files.reader(
    ['.', *configuration.folders],
    remote_imports=configuration.remote_imports,
    dialect=configuration.dialect,
  )
  given = configuration.dialect.rename(configuration.bindings)
  try:
    with _opened_by(read):
      gin.parse_config_files_and_bindings(
        configuration.files, given, finalize_config=False
      )
  except OSError as error:
    reason = error.strerror or error
    raise ValueError(f'gin: {error.filename}: {reason}') from error
  except Exception as error:
    _check_values(given)
    reason = ' '.join(str(error).split()).removeprefix('gin: ')
    if isinstance(error, ImportError):
      reason += ': install it, or leave the import out'
    raise ValueError(f'gin: {reason}') from error
  _check_macros(bindings())
  gin_types.check(bindings(), gin.get_configurable)


@functools.cache  # gin takes tens of milliseconds to write them down.
def bindings() -> Mapping[str, str]:
  """Returns all bindings of the last `parse`, macros too, as written."""
  # Values of many lines are written on one, however long it is.
  text = _import_gin().config_str(max_line_length=10**6)
  pairs = [line.split(' = ', 1) for line in text.splitlines() if ' = ' in line]
  return {name: value for name, value in pairs if not name.startswith('#')}


def operative_config() -> str:
  """Returns the bindings used so far, defaults included, as a gin file."""
  return _import_gin().operative_config_str()


def _check_values(given: Sequence[str]) -> None:
  """Raises ValueError for a value that gin cannot read."""
  for binding in filter(lambda each: '=' in each, given):
    name, value = (part.strip() for part in binding.split('=', 1))
    try:
      _import_gin().config.parse_value(value)
    except (SyntaxError, tokenize.TokenError) as error:
      # gin names neither, and most often the shell has taken the quotes.
      raise ValueError(
        f'gin: {value or "nothing"} is no value for {name}: a text has quotes '
        f'inside those of the shell, {_BINDING}{name}=\'"{value}"\''
      ) from error
    except ValueError:  # A reference, which only its files can resolve.
      continue


def _check_macros(bound: Mapping[str, str]) -> None:
  """Raises ValueError for macros without a value, or without a use."""
  values = '\n'.join(bound.values())
  unquoted = re.sub(r"""(['"])(?:\\.|.)*?\1""", '', values)
  used = set(re.findall(r'%(\w+)(?![\w.])', unquoted))
  # First: one that is misspelt leaves another without a value.
  for name in sorted(set(filter(str.isidentifier, bound)) - used):
    same = [each for each in bound if each.endswith(f'.{name.lower()}')]
    hint = did_you_mean(name, used, cutoff=0.7)
    if not hint and same:
      hint = f'; did you mean {" or ".join(same)}?'
    raise ValueError(f'gin: no file that was given uses {name}{hint}')
  if missing := sorted(x for x in used if bound.get(x, _REQUIRED) == _REQUIRED):
    raise ValueError(
      f'gin: no value for {", ".join(missing)}: give {_BINDING}{missing[0]}='
      'VALUE'
    )


@contextlib.contextmanager
def _opened_by(
  read: Callable[[str], AbstractContextManager[TextIO]],
) -> Iterator[None]:
  """Has gin open files by `read` alone."""
  # gin asks the readers and folders that it is given only after its own search,
  # which fails on a folder of Python's path without `__init__.py`, such as the
  # `runs` that models are trained in; and it keeps them for the next parse.
  config = _import_gin().config
  before = config._FILE_READERS
  config._FILE_READERS = [(read, lambda name: True)]
  try:
    yield
  finally:
    config._FILE_READERS = before


def _original(error: Exception) -> Exception:
  """Returns the error that gin has wrapped, once for each function."""
  # Its class has the name of the one it is made of, unlike PermissionError.
  while (inner := error.__context__) is not None and (
    type(error).__mro__[1] is type(inner)
    and type(error).__name__ == type(inner).__name__
  ):
    assert isinstance(inner, Exception)
    error = inner
  return error
