"""What is fuzzed: readers, the files changed under them, their formats."""

import functools
import gzip
import os
import pickle
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np

from specdec_jax import lazy
from specdec_jax.assembly import trace_files as storage
from specdec_jax.checkpoints import loading, orbax, t5x
from specdec_jax.text import vocabulary_files
from tests.fuzz import formats, mutations
from tests.fuzz.reader import (
  GGUF,
  GZIP,
  JSON,
  LINES,
  MSGPACK,
  PROTOBUF,
  SAFETENSORS,
  Reader,
)

# Of how many bytes a small file can be that decompresses to 64 MiB.
_BOMB_BYTES = 2**26


def _read_model(name: str, folder: Path) -> None:
  loaded = loading.load(str(folder / name))
  _use(loaded.vocabulary, folder)


def _read_network(folder: Path) -> None:
  loading.read(folder)


def _read_gguf_gemma(folder: Path) -> None:
  loading.read(folder / 'model.gguf')


def _read_drafter(folder: Path) -> None:
  loading.read(folder)


def _read_vocabulary(folder: Path) -> None:
  _use(vocabulary_files.read(folder), folder)


def _use(vocabulary: Any, folder: Path) -> None:
  """What every command does with a vocabulary, which knows no file."""
  try:
    ids = vocabulary.encode('the hat in the box')
    vocabulary.decode(ids)
    vocabulary.id_to_text(vocabulary.vocab_size - 1)
    if vocabulary.chat_template is not None:
      vocabulary.encode_chat('in the box')
  except ValueError as error:
    raise ValueError(f'{folder}: {error}') from error


# What `seeds` wrote into the checkpoints.
_SHAPES = {
  'decoder': {'kernel': (6, 4), 'norm': {'scale': (4,)}},
  'embedding': (3, 2),
}
_EXPECTED = jax.tree.map(
  lambda shape: jax.ShapeDtypeStruct(shape, np.float32),
  _SHAPES,
  is_leaf=lambda node: isinstance(node, tuple),
)


def _read_t5x(folder: Path) -> None:
  t5x.read_target(folder, _EXPECTED)
  t5x.read_step(folder)


def _read_orbax(folder: Path) -> None:
  orbax.restore(folder, _EXPECTED)


def _read_trace(folder: Path) -> None:
  storage.read(folder / 'trace.jsonl')


_gguf = functools.partial(_read_model, 'model.gguf')
_model = functools.partial(_read_model, '')

READERS = {
  'gguf': Reader('gguf', 'model.gguf', _gguf, GGUF),
  'safetensors': Reader('llama', 'model-*.safetensors', _model, SAFETENSORS),
  'index': Reader('llama', '*.index.json', _model, JSON),
  'config_llama': Reader('llama', 'config.json', _model, JSON),
  'config_t5': Reader('t5', '*config.json', _model, JSON),
  'eagle': Reader(
    'eagle', 'config.json model.safetensors', _read_drafter, JSON
  ),
  'config_gemma': Reader('gemma', 'config.json', _read_network, JSON),
  'config_t5gemma': Reader('t5gemma', 'config.json', _read_network, JSON),
  'gguf_gemma': Reader('gguf_gemma', 'model.gguf', _read_gguf_gemma, GGUF),
  'tokenizer': Reader('llama', 'tokenizer.json', _read_vocabulary, JSON),
  'tokenizer_config': Reader(
    'llama', '*[nr]_config.json', _read_vocabulary, JSON
  ),
  'sentencepiece': Reader('ours', 'spiece.model', _read_vocabulary, PROTOBUF),
  'model_json': Reader('ours', 'model.json', _model, JSON),
  't5x': Reader('t5x', 'checkpoint_1/checkpoint', _read_t5x, MSGPACK),
  't5x_zarr': Reader('t5x', '**/.zarray', _read_t5x, JSON),
  't5x_chunk': Reader('t5x', '**/0.0', _read_t5x, GZIP),
  'orbax': Reader('orbax', 'params/_METADATA', _read_orbax, JSON),
  'orbax_ocdbt': Reader(
    'orbax', 'params/**/d/* params/**/manifest.ocdbt', _read_orbax
  ),
  'orbax_zarr': Reader('orbax_files', 'params/*/.zarray', _read_orbax, JSON),
  'orbax_chunk': Reader('orbax_files', 'params/*/0*', _read_orbax),
  'trace': Reader('trace', 'trace.jsonl', _read_trace, LINES),
}
for rows in lazy.installed(
  'tests.trace.fuzzed:READERS', 'tests.training.fuzzed:READERS'
):
  READERS |= rows


class Panic(BaseException):
  """As Rust's panics, no Exception."""


def _refuse(folder: Path) -> None:
  raise ValueError('some file is wrong')


def _forget(folder: Path) -> None:
  raise KeyError(folder.name)


def _panic(folder: Path) -> None:
  raise Panic


def _leave(folder: Path) -> None:
  (folder.parent / 'outside' / 'model.gguf').read_bytes()


def _allocate(folder: Path) -> None:
  bytearray(2**26)


def _spin(folder: Path) -> None:
  while True:
    pass


def _abort(folder: Path) -> None:
  os.abort()


def _planted(fault: Callable[[Path], None]) -> Reader:
  """A reader of traces that goes wrong where it ought to raise ValueError."""

  def read(folder: Path) -> None:
    try:
      _read_trace(folder)
    except ValueError:
      fault(folder)

  return Reader('trace', 'trace.jsonl', read, LINES)


# By the outcome that each must have.
PLANTED = {
  'unnamed': _planted(_refuse),
  'error': _planted(_forget),
  'panic': _planted(_panic),
  'outside': _planted(_leave),
  'memory': _planted(_allocate),
  'hang': _planted(_spin),
  'death': _planted(_abort),
}


class Inputs:
  """The inputs of one reader: the k-th is a function of the seed and k.

  Attributes:
    name: of the reader.
    reader: the reader.
    files: the bytes of the files that are changed, by their path in the folder.
  """

  def __init__(self, name: str, seeds: Path):
    self.name, self.reader = name, (READERS | PLANTED)[name]
    folder = seeds / self.reader.folder
    patterns = self.reader.patterns.split()
    paths = sorted(path for each in patterns for path in folder.glob(each))
    assert paths, f'{folder} has no {patterns}'
    self.files = {str(p.relative_to(folder)): p.read_bytes() for p in paths}
    self._trees = {name: self._parse(folder / name) for name in self.files}
    self._donors = [p.read_bytes() for p in folder.rglob('*') if p.is_file()]

  def _parse(self, path: Path) -> bytes | None:
    form = self.reader.format
    if form is None or (form is JSON and path.suffix == '.safetensors'):
      return None
    if form is GGUF:
      return pickle.dumps(formats.parse_gguf(path))
    return pickle.dumps(form.parse(path.read_bytes()))

  def at(self, seed: int, k: int) -> tuple[str, bytes | None]:
    """The file that the k-th input changes, and its bytes; None removes it."""
    rng = random.Random(f'{seed}/{self.name}/{k}')
    name = rng.choice(list(self.files))
    kind = rng.randrange(64)
    if kind == 0:
      return name, rng.choice((None, b'', rng.randbytes(64)))
    if kind == 1 and self.reader.format is GZIP:
      return name, _bomb()
    tree = self._trees[name]
    if tree is None or kind < 32:
      other = rng.choice(self._donors)
      return name, mutations.mutate_bytes(rng, self.files[name], other)
    assert self.reader.format is not None
    changed = mutations.mutate_tree(rng, pickle.loads(tree))
    return name, self.reader.format.write(changed)


@functools.cache
def _bomb() -> bytes:
  return gzip.compress(bytes(_BOMB_BYTES), compresslevel=1)
