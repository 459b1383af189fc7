"""A reader of files under fuzzing, and the formats of its files."""

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.fuzz import formats


@dataclasses.dataclass(frozen=True)
class Format:
  """How a file becomes a tree and a tree becomes a file."""

  parse: Callable[[bytes], Any]
  write: Callable[[Any], bytes]


@dataclasses.dataclass(frozen=True)
class Reader:
  """A reader and the files that are changed under it.

  Attributes:
    folder: the seed that it reads, a folder of `seeds.extract`.
    patterns: which files of it are changed, separated by blanks.
    read: reads the folder, and uses what it read.
    format: of the files, or None where only bytes are changed.
  """

  folder: str
  patterns: str
  read: Callable[[Path], None]
  format: Format | None = None


JSON = Format(formats.parse_json, formats.write_json)
LINES = Format(formats.parse_lines, formats.write_lines)
SAFETENSORS = Format(formats.parse_safetensors, formats.write_safetensors)
MSGPACK = Format(formats.parse_msgpack, formats.write_msgpack)
PROTOBUF = Format(formats.parse_protobuf, formats.write_protobuf)
GZIP = Format(formats.parse_gzip, formats.write_gzip)
GGUF = Format(lambda data: None, formats.write_gguf)
