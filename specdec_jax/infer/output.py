"""The files of an inference: chunks, then one file, named as T5X names them.

`OUT/{task}-{mode}.jsonl-SSSSS-of-NNNNN` is one shard, with a mark (`marks`)
once it is complete. Until then its chunks are in `OUT/tmp-...`, with marks too.
Every file appears under its name only when it is complete: a process may be
killed at any moment, and a later one resumes; in a bucket, on any host.
"""

import contextlib
import dataclasses
import glob
import hashlib
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from specdec_jax.files import replacing
from specdec_jax.files.one_writer import one_writer
from specdec_jax.files.paths import is_in_bucket, remove_tree
from specdec_jax.infer import marks
from specdec_jax.infer.marks import Counts, Mark
from specdec_jax.launch import agreement

CONFIG_FILE = 'config.gin'
_SETTINGS = 'settings.json'
SHARD = re.compile(r'(?P<stem>.+\.jsonl)-(?P<id>\d{5})-of-(?P<count>\d{5})')


@dataclasses.dataclass(frozen=True)
class Shard:
  """The paths of one shard; `path` is the final file."""

  folder: Path
  task: str
  mode: str
  shard_id: int
  num_shards: int

  @property
  def path(self) -> Path:
    return self.folder / self._name('.jsonl')

  @property
  def chunk_folder(self) -> Path:
    return self.folder / f'tmp-{self._name("")}'

  def chunk_path(self, index: int) -> Path:
    return self.chunk_folder / f'{self.path.name}-chunk{index:05}'

  def _name(self, suffix: str) -> str:
    place = f'{self.shard_id:05}-of-{self.num_shards:05}'
    return f'{self.task}-{self.mode}{suffix}-{place}'


@contextlib.contextmanager
def only_writer(path: Path) -> Iterator[None]:
  """Runs the block as the only process that writes a shard. ValueError if
  another process writes it, or the folder cannot be written."""
  with contextlib.ExitStack() as stack:
    try:
      lock = path.with_name(f'{path.name}.lock')
      stack.enter_context(one_writer(lock, path))
      # Partial files of killed writers.
      begun = f'{glob.escape(path.name)}*{replacing.PARTIAL}*'
      for partial in path.parent.glob(begun):
        partial.unlink()
    except OSError as error:
      raise _cannot_write(path.parent, error) from error
    yield


def begin(shard: Shard, settings: Mapping[str, str]) -> Mark | None:
  """Starts or resumes a shard; returns its mark if it is already complete.

  `settings` are all settings that results depend on, by name. ValueError if the
  folder has results of other settings, or cannot be written.
  """
  mark = _final_mark(shard, settings)
  if mark is not None:
    marks.read_whole(shard.path, mark)
    # A run may have been killed between writing the mark and removing the
    # chunks.
    remove_tree(shard.chunk_folder)
    return mark
  stored = shard.chunk_folder / _SETTINGS
  try:
    shard.chunk_folder.mkdir(parents=True, exist_ok=True)
    has_results = any(shard.chunk_folder.glob(f'*-chunk*{marks.SUFFIX}'))
    if not has_results and not is_in_bucket(stored):
      # Settings without results are stale. In a bucket their run may still be
      # active, before its first result.
      stored.unlink(missing_ok=True)
    elif stored.exists():
      _check_stored(shard, settings)
    elif has_results:
      raise ValueError(
        f'{shard.chunk_folder} has results, but no {_SETTINGS} that says of '
        'what: remove it, or choose another folder'
      )
  except OSError as error:
    raise _cannot_write(shard.folder, error) from error
  return None


def _cannot_write(folder: Path, error: OSError) -> ValueError:
  return ValueError(
    f'cannot write {error.filename or folder}: {error.strerror}'
  )


def check_examples(
  path: Path, mark: Mark, examples_digest: str, *, place: Path
) -> None:
  """Raises, with what to remove, if a file is of other examples."""
  if mark.examples_digest != examples_digest:
    raise ValueError(
      f'{path} was made of other examples: choose another folder, or remove '
      f'{place}'
    )


def _final_mark(shard: Shard, settings: Mapping[str, str]) -> Mark | None:
  """Reads the mark of the final file; ValueError if its settings differ."""
  mark = marks.read(shard.path)
  if mark is not None:
    _check_settings(shard.path, mark.settings, settings)
  return mark


def _claim(shard: Shard, settings: Mapping[str, str]) -> str:
  """Writes the settings into the folder of chunks, if they are not there, and
  returns their digest. ValueError if that folder, or the final file, has other
  settings."""
  # A run that started at the same time may have finished the shard.
  _final_mark(shard, settings)
  stored = shard.chunk_folder / _SETTINGS
  if not stored.exists():
    text = json.dumps(dict(settings), indent=2) + '\n'
    replacing.create_text(stored, text)
  return agreement.of_settings(_check_stored(shard, settings))


def _check_stored(
  shard: Shard, settings: Mapping[str, str]
) -> Mapping[str, str]:
  """Returns the stored settings; ValueError if they are not these."""
  stored = shard.chunk_folder / _SETTINGS
  stored_settings = json.loads(stored.read_text('utf-8'))
  _check_settings(shard.chunk_folder, stored_settings, settings)
  return stored_settings


def _check_settings(
  place: Path, stored: object, settings: Mapping[str, str]
) -> None:
  stored = stored if isinstance(stored, dict) else {}
  differing = agreement.differences(stored, settings, '{} was {}, now {}')
  if differing:
    raise ValueError(
      f'{place} has results of other settings: {differing}; choose another '
      'folder, or remove it'
    )


def chunk_mark(shard: Shard, index: int, examples_digest: str) -> Mark | None:
  """Returns a chunk's mark, or None; raises if it is of other examples."""
  path = shard.chunk_path(index)
  # A full disk can leave an empty chunk beside a complete mark.
  mark = marks.read(path)
  if mark is None or not marks.is_whole(path, mark):
    return None
  check_examples(path, mark, examples_digest, place=shard.chunk_folder)
  return mark


def read_chunk(shard: Shard, index: int) -> list[dict]:
  """Reads the objects of a chunk that is complete."""
  text = shard.chunk_path(index).read_text('utf-8')
  return [json.loads(line) for line in text.splitlines()]


def write_chunk(
  shard: Shard,
  index: int,
  records: Iterable[Mapping[str, object]],
  mark: Mark,
  settings: Mapping[str, str],
) -> Mark:
  """Writes one object per line, and then the mark of a complete chunk.

  Returns the stored mark: in a bucket that of the first writer. ValueError if
  another run has started with other `settings` since `begin`.
  """
  path = shard.chunk_path(index)
  lines = ''.join(json.dumps(record) + '\n' for record in records)
  mark = dataclasses.replace(
    mark,
    settings_digest=_claim(shard, settings),
    digest=marks.of_bytes(lines.encode()),
  )
  # Another host may have written the chunk.
  if is_in_bucket(path):
    existing_mark = marks.read(path)
    if existing_mark is not None and marks.is_whole(path, existing_mark):
      return existing_mark
  # A process that is killed here leaves a chunk without its mark, which the
  # next run decodes again.
  replacing.write_text(path, lines)
  return marks.write_first(path, mark)


def write_config(shard: Shard, text: str) -> None:
  """Writes `config.gin`, which is the same for all shards."""
  # First written beside the chunks, with which a file of a killed process is
  # removed.
  final, begun = shard.folder / CONFIG_FILE, shard.chunk_folder / CONFIG_FILE
  if is_in_bucket(final):
    replacing.write_text(final, text)
  else:
    replacing.write_text(begun, text)
    begun.replace(final)


def finish(
  shard: Shard,
  num_chunks: int,
  counts: Counts,
  settings: Mapping[str, str],
) -> None:
  """Joins the chunks, all complete, to the final file, and removes them; its
  mark has `counts`, their sum. ValueError if a chunk does not match its mark,
  or has other settings than those of `begin`."""
  # Checked again: a run with other settings may have started since.
  settings_digest = _claim(shard, settings)
  digest = hashlib.sha256()
  examples_digests = []
  with replacing.file(shard.path) as partial, partial.open('wb') as file:
    for index in range(num_chunks):
      path = shard.chunk_path(index)
      chunk = marks.read(path)
      if chunk is None:
        raise ValueError(f'{path} has vanished: give the command again')
      lines = marks.read_whole(path, chunk)
      # The chunk may be of another run.
      if chunk.settings_digest != settings_digest:
        raise ValueError(
          f'{path} is of other settings: remove {shard.chunk_folder}, and give '
          'the command again'
        )
      examples_digests.append(chunk.examples_digest)
      digest.update(lines)
      file.write(lines)
  mark = Mark(
    **vars(counts),
    examples_digest=marks.add_digests(examples_digests),
    settings=settings,
    digest=digest.hexdigest(),
  )
  marks.write(shard.path, mark)
  # Chunks are removed last: without the mark, a restart joins them again.
  remove_tree(shard.chunk_folder, ignore_errors=False)


def merge(folder: Path) -> list[tuple[Path, int]]:
  """Joins all shards of every task in a folder to `-00000-of-00001`, the file
  that an unsharded run writes; returns the files and their numbers of lines.
  ValueError if there are no shards, some are missing, incomplete or of other
  settings, or the merged file already exists with other results."""
  # By name and number of shards: a folder may hold several tasks, or one task
  # in 2 shards and in 4.
  groups: dict[tuple[str, int], dict[int, Path]] = {}
  # 'wmt-predict.jsonl-00001-of-00004' is shard 1 of ('wmt-predict.jsonl', 4).
  for path in sorted(folder.glob('*.jsonl-*-of-*')):
    match = SHARD.fullmatch(path.name)
    if match and int(match['count']) > 1:
      group = groups.setdefault((match['stem'], int(match['count'])), {})
      group[int(match['id'])] = path
  if not groups:
    raise ValueError(f'{folder} has no shards to merge')
  merged = []
  for (stem, count), paths in groups.items():
    final = folder / f'{stem}-00000-of-00001'
    with only_writer(final):
      merged.append((final, _merge_shards(final, count, paths)))
  return merged


def _merge_shards(final: Path, count: int, paths: Mapping[int, Path]) -> int:
  """Joins the shards of one task; returns the number of lines."""
  # Read the marks.
  shard_marks = {}
  for i, path in paths.items():
    mark = marks.read(path)
    if mark is not None:
      shard_marks[i] = mark
  missing = [i for i in range(count) if i not in shard_marks]
  if missing:
    raise ValueError(
      f'{final.parent}: of {count} shards of {final.name.split(".jsonl")[0]}, '
      f'{len(missing)} are not complete: {", ".join(map(str, missing[:8]))}'
    )
  settings = shard_marks[0].settings or {}
  shards = []
  for i in range(count):
    _check_settings(paths[i], shard_marks[i].settings, settings)
    shards.append(marks.read_whole(paths[i], shard_marks[i]))
  # Join the lines.
  lines = list(_interleave(shards))
  merged = b''.join(lines)
  mark = Mark(
    **vars(sum(shard_marks.values(), Counts())),
    examples_digest=marks.add_digests(
      m.examples_digest for m in shard_marks.values()
    ),
    settings=settings,
    digest=marks.of_bytes(merged),
  )
  # Write them, unless there are other results.
  is_other = final.exists() and final.read_bytes() != merged
  if is_other or marks.read(final) not in (None, mark):
    raise ValueError(f'{final} already exists, of other results: move it away')
  replacing.write_text(final, merged.decode('utf-8'))
  marks.write(final, mark)
  return len(lines)


def _interleave(shards: Sequence[bytes]) -> Iterator[bytes]:
  """Yields line `i // N` of shard `i % N` as line i."""
  # Of shards [a d], [b e] and [c]: a b c d e. Without c, line 2 is missing.
  lines = [shard.splitlines(keepends=True) for shard in shards]
  for i in range(sum(map(len, lines))):
    shard, line = i % len(lines), i // len(lines)
    if line >= len(lines[shard]):
      raise ValueError(
        f'shard {shard} has {len(lines[shard])} lines, too few for the others'
      )
    yield lines[shard][line]
