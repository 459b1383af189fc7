"""Settings and digests that the processes, or runs, of a job must share."""

import concurrent.futures
import hashlib
import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path

import jax
import numpy as np
from jax.experimental import multihost_utils

from specdec_jax.files.paths import in_bucket

# Bytes of the parts of a file that are read in parallel, and of their blocks.
_PART = 2**26
_BLOCK = 2**20


def of_settings(settings: Mapping[str, str]) -> str:
  return hashlib.sha256(_text(settings)).hexdigest()


def of_files(paths: Iterable[Path]) -> str:
  """Returns a digest of files, and of all files in folders: of their names and
  bytes, or in a bucket of the server's checksums. It is the same on all hosts.
  """
  files: dict[str, Path] = {}
  digest = hashlib.sha256()
  for path in sorted(paths):
    if (remote := in_bucket(path)) is not None:
      digest.update(_text(remote.checksums()))
    else:
      for file in path.rglob('*') if path.is_dir() else [path]:
        if file.is_file():
          files[str(file.relative_to(path.parent))] = file
  sizes = {name: path.stat().st_size for name, path in sorted(files.items())}
  digest.update(_text(sizes))
  parts = [
    (files[name], start)
    for name, size in sizes.items()
    for start in range(0, size, _PART)
  ]
  # Threads help, since hashing releases Python's lock.
  num_threads = min(16, os.cpu_count() or 1)
  with concurrent.futures.ThreadPoolExecutor(num_threads) as pool:
    for part_digest in pool.map(_of_part, parts):
      digest.update(part_digest)
  return digest.hexdigest()[:16]


def _of_part(part: tuple[Path, int]) -> bytes:
  """Returns the digest of up to `_PART` bytes of a file, from a position on."""
  path, start = part
  digest = hashlib.sha256()
  block = memoryview(bytearray(_BLOCK))
  with path.open('rb', buffering=0) as file:
    file.seek(start)
    left = _PART
    while left and (num_read := file.readinto(block[:left])):
      digest.update(block[:num_read])
      left -= num_read
  return digest.digest()


def of_arrays(tree: object) -> str:
  """Returns the digest of the numpy arrays of a tree."""
  digest = hashlib.sha256()
  for leaf in jax.tree.leaves(tree):
    digest.update(np.ascontiguousarray(leaf).data)
  return digest.hexdigest()[:16]


def differences(
  first: Mapping[str, str], second: Mapping[str, str], wording: str
) -> str:
  """Describes three values that differ by `wording`, such as '{} was {}, now
  {}'; empty if none does."""
  sentences = []
  for name in sorted({*first, *second}):
    values = [mapping.get(name, 'not given') for mapping in (first, second)]
    if values[0] != values[1]:
      sentences.append(wording.format(name, *values))
  more = f' and {len(sentences) - 3} more' if len(sentences) > 3 else ''
  return '; '.join(sentences[:3]) + more


def check_everywhere(settings: Mapping[str, str]) -> None:
  """Raises ValueError in all processes unless they have the same settings. All
  processes must call it; it waits for them."""
  if jax.process_count() == 1:
    return
  gather = multihost_utils.process_allgather
  text = _text(settings)
  # All processes must send arrays of one shape; JSON may end in blanks.
  width = int(gather(np.int32(len(text))).max())
  texts = gather(np.frombuffer(text.ljust(width), np.uint8))
  first, *rest = (json.loads(bytes(row)) for row in texts)
  for index, process_settings in enumerate(rest, start=1):
    wording = f'{{}} is {{}} in process 0 and {{}} in process {index}'
    differing = differences(first, process_settings, wording)
    if differing:
      raise ValueError(
        f'the processes of a job need the same settings and files: {differing}'
      )


def _text(settings: Mapping[str, object]) -> bytes:
  return json.dumps(dict(settings), sort_keys=True).encode()
