"""The diffs of docs/extending.md are those of the files that they name."""

import pathlib
import re

import pytest

ROOT = pathlib.Path(__file__).parents[2]
DIFFS = re.findall(
  r'^```diff\n(.*?)^```$',
  (ROOT / 'docs' / 'extending.md').read_text(encoding='utf-8'),
  re.MULTILINE | re.DOTALL,
)
LEFT_OUT = '(one hunk left out: the whole file)'


def parts_of(diff: str) -> list[tuple[str, list[str]]]:
  """Each file of a diff, with its hunks as they read afterwards."""
  parts = []
  for part in diff.split('diff --git ')[1:]:
    path = re.search(r'^\+\+\+ b/(.*)$', part, re.MULTILINE)[1]
    hunks = []
    for hunk in part.split('\n@@\n')[1:]:
      lines = [line for line in hunk.splitlines() if line[:1] != '-']
      hunks.append('\n'.join(line[1:] for line in lines) + '\n')
    parts.append((path, hunks))
    assert hunks or LEFT_OUT in part, path
  return parts


def absent(diff: str) -> list[str]:
  """What the files of a diff do not contain."""
  return [
    f'{path}:\n{hunk}'
    for path, hunks in parts_of(diff)
    for hunk in hunks
    if hunk not in (ROOT / path).read_text(encoding='utf-8')
  ]


def test_there_is_a_diff_of_each_kind():
  assert len(DIFFS) == 4


@pytest.mark.parametrize('diff', DIFFS, ids=range(len(DIFFS)))
def test_a_diff_is_of_few_files_and_as_they_are(diff):
  parts = parts_of(diff)
  paths = [path for path, _ in parts]
  # Besides files that are new as a whole.
  assert 1 <= len([path for path, hunks in parts if hunks]) <= 2
  assert len({*paths}) == len(paths) <= 4
  assert all((ROOT / path).is_file() for path in paths)
  assert not absent(diff)


def test_a_line_that_has_changed_is_noticed():
  first = DIFFS[0].replace("+  'eagle': ", "+  'eagle3': ")
  assert first != DIFFS[0]
  assert len(absent(first)) == 1
