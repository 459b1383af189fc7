"""The files of an inference: chunks, then one file, named as T5X names them.

`OUT/{task}-{mode}.jsonl-SSSSS-of-NNNNN` is one shard, and beside it stands
`.COMPLETED` once it is whole. Until then its chunks lie in `OUT/tmp-...`, each
with a `.COMPLETED` of its own. Every file appears under its name only when it
is complete: a process may be killed at any moment, and a later one goes on; in
a bucket, on any host.
"""

import contextlib
import dataclasses
import glob
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from specdec_jax.files import replacing
from specdec_jax.files.one_writer import one_writer
from specdec_jax.files.paths import is_in_bucket, remove_tree
from specdec_jax.files.require import require
from specdec_jax.launch import agreement
from specdec_jax.theory.gamma_trials import ChosenGamma

CONFIG_FILE = 'config.gin'
# What a mark calls the choice of gamma 'auto'.
GAMMA = 'gamma'
_COMPLETED = '.COMPLETED'
_DIGEST = 'examples_digest'
_SETTINGS = 'settings.json'
_SETTINGS_DIGEST = 'settings_digest'
_SHARD = re.compile(r'(?P<stem>.+\.jsonl)-(?P<id>\d{5})-of-(?P<count>\d{5})')


@dataclasses.dataclass(frozen=True, kw_only=True)
class Shard:
  """Where the results of one shard go: `path` is the final file."""

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
  """Runs the block as the only process that writes a shard's final file. Raises
  ValueError if another one does, or the folder cannot be written."""
  with contextlib.ExitStack() as stack:
    try:
      lock = path.with_name(f'{path.name}.lock')
      stack.enter_context(one_writer(lock, path))
      # What killed writers left.
      begun = f'{glob.escape(path.name)}*{replacing.PARTIAL}*'
      for partial in path.parent.glob(begun):
        partial.unlink()
    except OSError as error:
      raise _cannot_write(path.parent, error) from error
    yield


def begin(shard: Shard, settings: Mapping[str, str]) -> dict[str, Any] | None:
  """Opens a shard, new or begun; what `finish` said of it, if it is complete
  already. `settings` are by name all that results depend on. Raises ValueError
  if the folder has results of other settings, or cannot be written."""
  if (summary := _read_mark(shard.path)) is not None:
    _check_settings(shard.path, summary.get('settings'), settings)
    _check_whole(shard.path, summary)
    remove_tree(shard.chunk_folder)
    return summary
  stored = shard.chunk_folder / _SETTINGS
  try:
    shard.chunk_folder.mkdir(parents=True, exist_ok=True)
    has_results = any(shard.chunk_folder.glob(f'*-chunk*{_COMPLETED}'))
    if not has_results and not is_in_bucket(stored):
      # A run that failed before its first result binds nobody. In a bucket it
      # may be about to write it.
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
  shard: Shard, summary: Mapping[str, Any], examples_digest: str
) -> None:
  """Raises ValueError unless a complete shard was made of these examples."""
  if summary.get(_DIGEST) != examples_digest:
    raise ValueError(
      f'{shard.path} was made of other examples: the task has changed since; '
      'choose another folder, or remove it'
    )


def _claim(shard: Shard, settings: Mapping[str, str]) -> str:
  """Has the folder of chunks say of what settings they are, unless it does; the
  digest of what it says. Raises ValueError if it says others, or the final file
  is of others: of two runs that begin together, one is the first here."""
  if (summary := _read_mark(shard.path)) is not None:
    _check_settings(shard.path, summary.get('settings'), settings)
  stored: Any = shard.chunk_folder / _SETTINGS
  if not stored.exists():
    text = json.dumps(dict(settings), indent=2) + '\n'
    if is_in_bucket(stored):
      stored.create(text)
    else:
      write_whole(stored, text)
  return agreement.of_settings(_check_stored(shard, settings))


def _check_stored(shard: Shard, settings: Mapping[str, str]) -> dict[str, Any]:
  """The settings that the folder of chunks has, if they are these."""
  stored = shard.chunk_folder / _SETTINGS
  found = json.loads(stored.read_text('utf-8'))
  _check_settings(shard.chunk_folder, found, settings)
  return found


def _check_settings(
  place: Path, stored: Any, settings: Mapping[str, str]
) -> None:
  stored = stored if isinstance(stored, dict) else {}
  if found := agreement.differences(stored, settings, '{} was {}, now {}'):
    raise ValueError(
      f'{place} has results of other settings: {found}; choose another folder, '
      'or remove it'
    )


def chunk_summary(
  shard: Shard, index: int, examples_digest: str
) -> dict[str, Any] | None:
  """What `write_chunk` said of a chunk, or None if it is yet to be made. Raises
  ValueError if it was made of other examples."""
  path = shard.chunk_path(index)
  summary = _read_mark(path)
  if summary is None or _num_lines(path) != summary['examples']:
    return None
  if summary.get(_DIGEST) != examples_digest:
    raise ValueError(
      f'{path} was made of other examples: the task has changed since; remove '
      f'{shard.chunk_folder}, or choose another folder'
    )
  return summary


def choice_of(shard: Shard, summary: Mapping[str, Any]) -> ChosenGamma:
  """The gamma that a run chose, as its first chunk says; else ValueError."""
  try:
    return ChosenGamma(**summary[GAMMA])
  except (KeyError, TypeError) as error:
    mark = _mark_of(shard.chunk_path(0))
    raise ValueError(
      f'{mark} does not say which gamma was chosen: remove '
      f'{shard.chunk_folder}, or choose another folder'
    ) from error


def write_chunk(
  shard: Shard,
  index: int,
  records: Iterable[Mapping[str, Any]],
  summary: Mapping[str, Any],
  settings: Mapping[str, str],
) -> Mapping[str, Any]:
  """Writes one object per line, and then that it is complete. `summary` has
  `examples`, how many they are, other counts, and `examples_digest`, see
  `add_digests`. Returns the summary that stands: in a bucket that of whoever
  was first, since another gamma may have been the fastest there. Raises
  ValueError if a run of other `settings` than those of `begin` was first."""
  path = shard.chunk_path(index)
  summary = {**summary, _SETTINGS_DIGEST: _claim(shard, settings)}
  write_whole(path, ''.join(json.dumps(record) + '\n' for record in records))
  if is_in_bucket(path):
    mark: Any = _mark_of(path)
    if not mark.create(_mark_text(summary)):
      return _read_mark(path) or summary
  else:
    _write_mark(path, summary)
  return summary


def write_config(shard: Shard, text: str) -> None:
  """Writes `config.gin`, which is the same for all shards, whichever they are
  and whenever they write it."""
  final, begun = shard.folder / CONFIG_FILE, shard.chunk_folder / CONFIG_FILE
  if is_in_bucket(final):
    write_whole(final, text)
  else:
    write_whole(begun, text)
    begun.replace(final)


def finish(shard: Shard, num_chunks: int, summary: Mapping[str, Any]) -> None:
  """Joins the chunks, all complete, to the final file, and removes them.
  `summary` has the sums of their counts, and `settings`, those of `begin`.
  Raises ValueError if a chunk does not have the lines that its mark says, or is
  of other settings."""
  own = _claim(shard, summary['settings'])
  digests = []
  with replacing.file(shard.path) as partial, partial.open('wb') as file:
    for index in range(num_chunks):
      path = shard.chunk_path(index)
      if (mark := _read_mark(path)) is None:
        raise ValueError(f'{path} has vanished: give the command again')
      _check_whole(path, mark)
      if mark.get(_SETTINGS_DIGEST) != own:
        raise ValueError(
          f'{path} is of other settings: remove {shard.chunk_folder}, and give '
          'the command again'
        )
      digests.append(mark[_DIGEST])
      file.write(path.read_bytes())
  _write_mark(shard.path, {**summary, _DIGEST: add_digests(digests)})
  remove_tree(shard.chunk_folder, ignore_errors=False)


def add_digests(digests: Iterable[str]) -> str:
  """The digest of examples together, in whatever parts and order they come: the
  sum of their own, as 64 hexadecimal digits."""
  return f'{sum(int(digest, 16) for digest in digests) % 2**256:064x}'


def _check_whole(path: Path, mark: Mapping[str, Any]) -> None:
  """Raises ValueError unless a file has as many lines as its mark says."""
  if (found := _num_lines(path)) != mark['examples']:
    lines = 'no file' if found is None else f'{found} lines'
    raise ValueError(
      f'{path}: there should be {mark["examples"]} lines, as '
      f'{_mark_of(path).name} says, and there is {lines}: remove '
      f'{_mark_of(path)}, and give the command again'
    )


def _num_lines(path: Path) -> int | None:
  return path.read_bytes().count(b'\n') if path.is_file() else None


def write_whole(path: Path, text: str) -> None:
  """Writes a file that appears complete or not at all."""
  with replacing.file(path) as partial:
    partial.write_text(text, encoding='utf-8', newline='\n')


def _mark_of(path: Path) -> Path:
  return path.with_name(path.name + _COMPLETED)


def _write_mark(path: Path, summary: Mapping[str, Any]) -> None:
  write_whole(_mark_of(path), _mark_text(summary))


def _mark_text(summary: Mapping[str, Any]) -> str:
  return json.dumps(dict(summary), indent=2) + '\n'


def _read_mark(path: Path) -> dict[str, Any] | None:
  mark = _mark_of(path)
  if not mark.is_file():
    return None
  try:
    summary = dict(json.loads(mark.read_text('utf-8')))
    int(summary[_DIGEST], 16)
    int(summary['examples'])
    return summary
  except (ValueError, TypeError, KeyError) as error:
    raise ValueError(
      f'{mark} is not what specdec writes: remove it, or choose another folder'
    ) from error


@contextlib.contextmanager
def metric_writer(folder: str | None) -> Iterator[Any]:
  """Yields `(step, figures)`, which writes them for TensorBoard with clu, if
  there is a folder; ImportError if clu or TensorFlow is not installed."""
  if folder is None:
    yield lambda step, figures: None
    return
  metric_writers = require(
    'clu.metric_writers',
    extra='infer,data',
    purpose='writing metrics for TensorBoard',
  )
  writer = metric_writers.create_default_writer(folder, asynchronous=False)
  try:
    yield writer.write_scalars
  finally:
    writer.close()


def merge(folder: Path) -> list[tuple[Path, int]]:
  """Joins all shards of every task in a folder to `-00000-of-00001`, the file
  that one unsharded run writes; the files, and how many lines each has.

  Raises:
    ValueError: if there are no shards, or some are missing, unfinished or of
      other settings, or their merged file is there already.
  """
  groups: dict[tuple[str, int], dict[int, Path]] = {}
  for path in sorted(folder.glob('*.jsonl-*-of-*')):
    match = _SHARD.fullmatch(path.name)
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
  """Joins the shards of one task; how many lines they have."""
  marks = {i: _read_mark(path) or {} for i, path in paths.items()}
  missing = [i for i in range(count) if not marks.get(i)]
  if missing:
    raise ValueError(
      f'{final.parent}: of {count} shards of {final.name.split(".jsonl")[0]}, '
      f'{len(missing)} are not complete: {", ".join(map(str, missing[:8]))}'
    )
  settings = marks[0].get('settings', {})
  for i, path in paths.items():
    _check_settings(path, marks[i].get('settings'), settings)
    _check_whole(path, marks[i])
  lines = list(_interleave([paths[i].read_bytes() for i in range(count)]))
  merged = b''.join(lines)
  counts = {
    name: sum(mark.get(name, 0) for mark in marks.values())
    for name, value in marks[0].items()
    if isinstance(value, int)
  }
  digest = add_digests(mark[_DIGEST] for mark in marks.values())
  summary: dict[str, Any]
  summary = {**counts, _DIGEST: digest, 'settings': settings}
  # What a process that was killed has left is the same, wherever it was.
  is_other = final.exists() and final.read_bytes() != merged
  if is_other or _read_mark(final) not in (None, summary):
    raise ValueError(f'{final} already exists, of other results: move it away')
  write_whole(final, merged.decode('utf-8'))
  _write_mark(final, summary)
  return len(lines)


def _interleave(shards: Sequence[bytes]) -> Iterator[bytes]:
  """Line i of all is line `i // N` of shard `i % N`."""
  lines = [shard.splitlines(keepends=True) for shard in shards]
  for i in range(sum(map(len, lines))):
    shard, line = i % len(lines), i // len(lines)
    if line >= len(lines[shard]):
      raise ValueError(
        f'shard {shard} has {len(lines[shard])} lines, too few for the others'
      )
    yield lines[shard][line]
