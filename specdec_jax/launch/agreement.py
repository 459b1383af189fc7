"""Settings and digests on which a job's processes, or runs, have to agree."""

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

# Files are read in parts of so many bytes, several at once, a part in blocks.
_PART = 2**26
_BLOCK = 2**20


def of_settings(settings: Mapping[str, str]) -> str:
  return hashlib.sha256(_text(settings)).hexdigest()


def of_files(paths: Iterable[Path]) -> str:
  """Returns a digest of files, and of all files in folders, that is the same on
  all hosts: of their names and all their bytes; of those in a bucket, of the
  server's checksums."""
  files: dict[str, Path] = {}
  digest = hashlib.sha256()
  for path in sorted(paths):
    if (remote := in_bucket(path)) is not None:
      digest.update(_text(remote.checksums()))
    else:
      found = path.rglob('*') if path.is_dir() else [path]
      names = {str(each.relative_to(path.parent)): each for each in found}
      files |= {name: each for name, each in names.items() if each.is_file()}
  sizes = {name: path.stat().st_size for name, path in sorted(files.items())}
  digest.update(_text(sizes))
  parts = [
    (files[name], start)
    for name, size in sizes.items()
    for start in range(0, size, _PART)
  ]
  # Reading waits for disks, and hashing leaves Python's lock.
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
  one: Mapping[str, str], other: Mapping[str, str], wording: str
) -> str:
  """Names three that differ, as '{} was {}, now {}'; empty if none does."""
  pairs = {
    name: [each.get(name, 'not given') for each in (one, other)]
    for name in sorted({*one, *other})
  }
  said = [wording.format(k, *v) for k, v in pairs.items() if v[0] != v[1]]
  more = f' and {len(said) - 3} more' if len(said) > 3 else ''
  return '; '.join(said[:3]) + more


def check_everywhere(settings: Mapping[str, str]) -> None:
  """Raises ValueError, in all processes, unless settings are the same in all of
  them; it says which are not. All have to call it, and wait here."""
  if jax.process_count() == 1:
    return
  gather = multihost_utils.process_allgather
  text = _text(settings)
  # All processes have to send equally much; JSON may end in blanks.
  width = int(gather(np.int32(len(text))).max())
  texts = gather(np.frombuffer(text.ljust(width), np.uint8))
  first, *others = (json.loads(bytes(row)) for row in texts)
  for index, other in enumerate(others, start=1):
    wording = f'{{}} is {{}} in process 0 and {{}} in process {index}'
    if found := differences(first, other, wording):
      raise ValueError(
        f'the processes of a job need the same settings and files: {found}'
      )


def _text(settings: Mapping[str, object]) -> bytes:
  return json.dumps(dict(settings), sort_keys=True).encode()
