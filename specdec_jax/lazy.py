"""Tables whose values are imported on lookup, and may not be installed.

The core has tables of commands, drafters, rules and networks that belong to
extras, such as `specdec_jax.contrib.ngram`. An extra can be removed by deleting
its folder: the tables then omit its rows.
"""

import importlib
import importlib.util
import pathlib
from collections.abc import Iterator, Mapping
from typing import Any, Generic, TypeVar

Value = TypeVar('Value')


def is_installed(module: str) -> bool:
  """Returns whether a module's file exists, without importing anything.

  A folder without `__init__.py` does not count: deleted packages leave compiled
  files behind.
  """
  package, *names = module.split('.')
  spec = importlib.util.find_spec(package)
  if spec is None or not names:
    return spec is not None and spec.has_location
  # `find_spec` of the whole name would import the packages around the module,
  # and what these import: scipy takes a second.
  for folder in spec.submodule_search_locations or ():
    path = pathlib.Path(folder, *names)
    if path.with_suffix('.py').is_file() or (path / '__init__.py').is_file():
      return True
  return False


def attribute(path: str) -> Any:
  """Imports `'package.module:name'` and returns the object of that name."""
  module, _, name = path.partition(':')
  return getattr(importlib.import_module(module), name)


def installed(*paths: str) -> tuple[Any, ...]:
  """Imports several `'package.module:name'`, except those not installed."""
  modules = [path.partition(':')[0] for path in paths]
  return tuple(
    attribute(path)
    for path, module in zip(paths, modules, strict=True)
    if is_installed(module)
  )


def extra_of(module: str) -> str:
  """Returns the extra that a module belongs to: its folder.

  `specdec_jax.contrib.ngram.choice` belongs to `contrib/ngram`.
  """
  folders = module.split('.')[1:-1]
  return '/'.join(folders)


class LazyTable(Mapping[str, Value], Generic[Value]):
  """A table whose values are given as `'package.module:name'`.

  Values are imported on lookup. Rows whose modules are not installed are
  omitted; errors while importing an installed module are raised.
  """

  def __init__(self, paths: Mapping[str, str]):
    self._paths = dict(paths)

  def __getitem__(self, key: str) -> Value:
    path = self._paths[key]
    if not is_installed(path.partition(':')[0]):
      raise KeyError(key)
    return attribute(path)

  def path(self, key: str) -> str:
    """Returns the `'package.module:name'` of a row."""
    return self._paths[key]

  def __iter__(self) -> Iterator[str]:
    for key, path in self._paths.items():
      if is_installed(path.partition(':')[0]):
        yield key

  def __len__(self) -> int:
    return sum(1 for _ in self)

  @property
  def absent(self) -> dict[str, str]:
    """The rows that are left out: the extra that each belongs to, by key."""
    modules = {key: path.partition(':')[0] for key, path in self._paths.items()}
    return {
      key: extra_of(module)
      for key, module in modules.items()
      if not is_installed(module)
    }
