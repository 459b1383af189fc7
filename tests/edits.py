"""Edits of a folder's files: cut, replaced, deleted, or changed as JSON."""

import json
import shutil


def edit_files(folder, edits) -> None:
  """Edits files by their paths in `folder`, or by patterns of such paths.

  An edit is the new contents, as bytes or text; a function of the old ones; or
  None, which deletes the file or folder.
  """
  for pattern, edit in edits.items():
    for path in sorted(folder.glob(pattern)) or [folder / pattern]:
      _edit(path, edit)


def _edit(path, edit) -> None:
  if edit is None:
    if path.is_dir():
      shutil.rmtree(path)
    else:
      path.unlink()
    return
  contents = edit(path.read_bytes()) if callable(edit) else edit
  if isinstance(contents, str):
    contents = contents.encode()
  path.write_bytes(contents)


def cut(size: int):
  """The first `size` bytes alone; of a negative size, all but the last."""
  return lambda contents: contents[:size]


def half(contents: bytes) -> bytes:
  return contents[: len(contents) // 2]


def change_json(**changes):
  """Other values for keys of a JSON object."""
  return lambda contents: json.dumps(json.loads(contents) | changes)
