"""Launches a function from gin files, with T5X's flags. Only this module uses
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
    bindings: of the command line; they override those of files.
    folders: the search path of files.
    remote_imports: whether files in buckets may import modules.
    dialect: of another project whose names files and bindings use.
  """

  files: Sequence[str] = ()
  bindings: Sequence[str] = ()
  folders: Sequence[str] = ()
  remote_imports: bool = False
  dialect: Dialect = gin_files.OWN


def add_arguments(
  parser: argparse.ArgumentParser, files: Sequence[str] = ()
) -> None:
  """Adds the flags. The help lists the macros of `files` of this package, with
  the comments of the first file that has a macro."""
  add = parser.add_argument_group('gin').add_argument
  add(
    '--gin_file',
    action='append',
    default=[],
    metavar='FILE',
    help='gin configuration: a path, or the name of a file of this package, '
    'such as runs/infer.gin; may be repeated; later files override earlier '
    'ones. Gin files can run any code: give only files that you trust',
  )
  add(
    '--gin_remote_imports',
    action='store_true',
    help='allow gin files in buckets to import modules',
  )
  add(
    '--gin_bindings',
    action='append',
    default=[],
    metavar='NAME=VALUE',
    help='an individual gin binding, which overrides all files; '
    '--gin.NAME=VALUE is the same. Strings are quoted: --gin.NAME=\'"text"\'',
  )
  add(
    '--gin_search_paths',
    default='.',
    metavar='DIR,...',
    help='comma-separated gin config path prefixes, searched for --gin_file '
    'and includes after the working directory and before this package',
  )
  listed = set()
  for file in files:
    shown = parser.add_argument_group(f'macros of {file}, as --gin.NAME=VALUE')
    for name, value, comment in _MACRO.findall(gin_files.shipped_text(file)):
      if name not in listed:
        default = '' if value == _REQUIRED else f' (default: {value})'
        # Only for --help: `expand` has rewritten such flags.
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


def from_args(args: argparse.Namespace, dialect: Dialect) -> Configuration:
  """Returns the configuration of the flags of `add_arguments`."""
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
  # Arguments are compared like bindings, except functions.
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
  # Gin files may import modules of the working directory, as with `python -m`.
  working_directory = os.getcwd()
  if working_directory not in sys.path:
    sys.path.append(working_directory)
  read = gin_files.reader(
    ['.', *configuration.folders],
    remote_imports=configuration.remote_imports,
    dialect=configuration.dialect,
  )
  renamed_bindings = configuration.dialect.rename(configuration.bindings)
  try:
    with _opened_by(read):
      gin.parse_config_files_and_bindings(
        configuration.files, renamed_bindings, finalize_config=False
      )
  except OSError as error:
    reason = error.strerror or error
    raise ValueError(f'gin: {error.filename}: {reason}') from error
  except Exception as error:
    _check_values(renamed_bindings)
    reason = ' '.join(str(error).split()).removeprefix('gin: ')
    if isinstance(error, ImportError):
      reason += ': install it, or leave the import out'
    raise ValueError(f'gin: {reason}') from error
  _check_macros(bindings())
  gin_types.check(bindings(), gin.get_configurable)


@functools.cache  # gin takes tens of milliseconds to format them.
def bindings() -> Mapping[str, str]:
  """Returns all bindings of the last `parse`, macros too, as written."""
  # Values of several lines are written on one line of any length.
  text = _import_gin().config_str(max_line_length=10**6)
  pairs = [line.split(' = ', 1) for line in text.splitlines() if ' = ' in line]
  return {name: value for name, value in pairs if not name.startswith('#')}


def operative_config() -> str:
  """Returns the bindings used so far, defaults included, as a gin file."""
  return _import_gin().operative_config_str()


def _check_values(binding_texts: Sequence[str]) -> None:
  """Raises ValueError for a value that gin cannot read."""
  for binding in binding_texts:
    if '=' not in binding:
      continue
    name, value = (part.strip() for part in binding.split('=', 1))
    try:
      _import_gin().config.parse_value(value)
    except (SyntaxError, tokenize.TokenError) as error:
      # gin does not name the binding; usually the shell removed the quotes.
      raise ValueError(
        f'gin: {value or "nothing"} is not a value for {name}: strings need '
        f'quotes within those of the shell, {_BINDING}{name}=\'"{value}"\''
      ) from error
    except ValueError:  # A reference, which depends on the files.
      continue


def _check_macros(bound: Mapping[str, str]) -> None:
  """Raises ValueError for macros without a value, or without a use."""
  values = '\n'.join(bound.values())
  unquoted = re.sub(r"""(['"])(?:\\.|.)*?\1""", '', values)
  used = set(re.findall(r'%(\w+)(?![\w.])', unquoted))
  # Unused macros first: a misspelt one leaves the intended one without a value.
  for name in sorted(set(filter(str.isidentifier, bound)) - used):
    suffix = f'.{name.lower()}'
    qualified = [binding for binding in bound if binding.endswith(suffix)]
    hint = did_you_mean(name, used, cutoff=0.7)
    if not hint and qualified:
      hint = f'; did you mean {" or ".join(qualified)}?'
    raise ValueError(f'gin: none of the files uses {name}{hint}')
  if missing := sorted(x for x in used if bound.get(x, _REQUIRED) == _REQUIRED):
    raise ValueError(
      f'gin: no value for {", ".join(missing)}: give {_BINDING}{missing[0]}='
      'VALUE'
    )


@contextlib.contextmanager
def _opened_by(
  read: Callable[[str], AbstractContextManager[TextIO]],
) -> Iterator[None]:
  """Makes gin open files only with `read`."""
  # Readers that are registered with gin come after its own search, which fails
  # on folders in sys.path without `__init__.py`, such as a `runs` with models,
  # and they stay registered.
  config = _import_gin().config
  before = config._FILE_READERS
  config._FILE_READERS = [(read, lambda name: True)]
  try:
    yield
  finally:
    config._FILE_READERS = before


def _original(error: Exception) -> Exception:
  """Returns the error that gin has wrapped, once per configured function."""
  # gin's wrapper is a subclass with the same name as its base.
  while (inner := error.__context__) is not None and (
    type(error).__mro__[1] is type(inner)
    and type(error).__name__ == type(inner).__name__
  ):
    assert isinstance(inner, Exception)
    error = inner
  return error
