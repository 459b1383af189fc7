"""The files of an inference, without a model."""

import errno
import json
import pathlib

import pytest

from specdec_jax.files import replacing
from specdec_jax.infer import marks, output
from specdec_jax.infer.marks import Counts, Mark
from specdec_jax.infer.output import Shard
from tests.edits import change_json, edit_files

SETTINGS = {'Decoding.seed': '0'}
MARK = Mark(examples=2, examples_digest=f'{7:064x}')


@pytest.fixture
def shard(tmp_path):
  return Shard(
    folder=tmp_path, task='task', mode='predict', shard_id=0, num_shards=1
  )


def write_two_chunks(shard) -> pathlib.Path:
  """Four lines; the path of the second chunk."""
  assert output.begin(shard, SETTINGS) is None
  for index in range(2):
    write_chunk(shard, index, SETTINGS)
  return shard.chunk_path(1)


def write_chunk(shard, index, settings) -> None:
  output.write_chunk(shard, index, [{'i': index}] * 2, MARK, settings)


def finish(shard, settings=SETTINGS) -> None:
  output.finish(shard, 2, Counts(examples=4), settings)


def test_a_chunk_of_0_bytes_is_not_complete(shard):
  chunk = write_two_chunks(shard)
  look = lambda: output.chunk_mark(shard, 1, f'{7:064x}')
  assert look().examples == MARK.examples
  chunk.write_bytes(b'')
  assert look() is None


def lose_a_line(chunk) -> None:
  chunk.write_text('{}\n')


def change_a_line(chunk) -> None:
  chunk.write_text('{"i": 1}\n{"i": 7}\n')


def change_the_settings(chunk) -> None:
  edit = change_json(settings_digest='another')
  edit_files(chunk.parent, {marks.path_of(chunk).name: edit})


@pytest.mark.parametrize(
  ('edit', 'message'),
  [
    (lose_a_line, r'2 lines.*1 lines.*COMPLETED'),
    (change_a_line, r'lines have changed.*COMPLETED'),
    (change_the_settings, r'chunk00001.*other settings'),
  ],
)
def test_chunks_that_have_changed_are_not_joined(shard, edit, message):
  edit(write_two_chunks(shard))
  with pytest.raises(ValueError, match=message):
    finish(shard)
  assert not shard.path.exists()


def test_a_chunk_of_other_bytes_is_not_complete(shard):
  """Of as many lines; a mark of an earlier version knows no more than that."""
  chunk = write_two_chunks(shard)
  change_a_line(chunk)
  assert output.chunk_mark(shard, 1, f'{7:064x}') is None
  write_chunk(shard, 1, SETTINGS)
  assert output.chunk_mark(shard, 1, f'{7:064x}') is not None

  mark = marks.path_of(chunk)
  written = json.loads(mark.read_text())
  del written['digest']
  mark.write_text(json.dumps(written))
  change_a_line(chunk)
  assert output.chunk_mark(shard, 1, f'{7:064x}').digest is None


def test_a_finished_shard_of_other_bytes_is_not_complete(shard, tmp_path):
  one, other = (
    Shard(folder=tmp_path, task='t', mode='predict', shard_id=i, num_shards=2)
    for i in range(2)
  )
  for each in (one, other):
    write_two_chunks(each)
    finish(each)
  assert output.begin(one, SETTINGS).examples == 4
  lines = one.path.read_text()
  one.path.write_text(lines.replace('1', '7'))
  refused = pytest.raises(ValueError, match='lines have changed')
  with refused:
    output.begin(one, SETTINGS)
  with refused:
    output.merge(tmp_path)
  one.path.write_text(lines)
  output.merge(tmp_path)
  merged = tmp_path / 't-predict.jsonl-00000-of-00001'
  assert marks.is_whole(merged, marks.read(merged))
  merged.write_text(merged.read_text().replace('1', '7'))
  assert not marks.is_whole(merged, marks.read(merged))


def test_a_finished_shard_that_lost_lines_is_not_complete(shard):
  write_two_chunks(shard)
  finish(shard)
  assert output.begin(shard, SETTINGS).examples == 4
  shard.path.write_text('{}\n')
  with pytest.raises(ValueError, match='4 lines'):
    output.begin(shard, SETTINGS)


def test_a_run_without_results_binds_nobody(shard):
  other = {'Decoding.seed': '3'}
  assert output.begin(shard, other) is None
  write_two_chunks(shard)
  with pytest.raises(ValueError, match=r'Decoding.seed was 0, now 3'):
    output.begin(shard, other)


def assert_later_run_refused(shard) -> None:
  """Both begin before either has a result."""
  other = {'Decoding.seed': '3'}
  for settings in (SETTINGS, other):
    assert output.begin(shard, settings) is None
  write_chunk(shard, 0, SETTINGS)
  refused = pytest.raises(ValueError, match=r'Decoding.seed was 0, now 3')
  with refused:
    write_chunk(shard, 0, other)
  write_chunk(shard, 1, SETTINGS)
  finish(shard)
  with refused:
    write_chunk(shard, 1, other)
  with refused:
    finish(shard, other)
  lines = shard.path.read_text().splitlines()
  assert [json.loads(line)['i'] for line in lines] == [0, 0, 1, 1]


def test_the_later_of_two_runs_that_begin_together_is_refused(shard):
  assert_later_run_refused(shard)


def test_partial_files_have_names_of_their_own(tmp_path, monkeypatch):
  replace, partial = pathlib.Path.replace, set()

  def note(self, target):
    partial.add(self.name)
    return replace(self, target)

  monkeypatch.setattr(pathlib.Path, 'replace', note)
  for _ in range(2):
    replacing.write_text(tmp_path / 'file', 'text')
  assert len(partial) == 2
  assert [path.name for path in tmp_path.iterdir()] == ['file']


def test_what_killed_writers_left_is_removed(shard):
  left = shard.folder / f'{shard.path.name}.COMPLETED.partial-7-0123'
  left.touch()
  with output.only_writer(shard.path):
    assert not left.exists()


def test_digests_of_shards_add_up_to_that_of_all(shard, tmp_path):
  for index in range(2):
    one = Shard(
      folder=tmp_path, task='task', mode='predict', shard_id=index, num_shards=2
    )
    write_two_chunks(one)
    finish(one)
  assert output.merge(tmp_path) == [(shard.path, 8)]
  mark = json.loads((tmp_path / f'{shard.path.name}.COMPLETED').read_text())
  assert mark['examples_digest'] == f'{28:064x}'
  assert not list(tmp_path.glob('*.lock'))


def test_a_file_that_cannot_be_written_leaves_the_old_one(tmp_path):
  path = tmp_path / 'file'
  path.write_text('old')
  path.chmod(0o640)

  def fail():
    with replacing.file(path) as begun:
      begun.write_text('half')
      raise OSError(errno.ENOSPC, 'No space left on device')

  with pytest.raises(ValueError, match=r'cannot write.*No space'):
    fail()
  assert [other.name for other in tmp_path.iterdir()] == ['file']
  assert path.read_text() == 'old'
  replacing.write_text(path, 'new')
  assert path.stat().st_mode & 0o777 == 0o640


def test_a_merge_that_was_killed_is_given_again(tmp_path):
  """The merged file is there, with its mark or without; another one stays."""
  for i in range(2):
    shard = Shard(
      folder=tmp_path, task='task', mode='predict', shard_id=i, num_shards=2
    )
    write_two_chunks(shard)
    finish(shard)
  ((final, num_lines),) = output.merge(tmp_path)
  merged, mark = final.read_bytes(), marks.path_of(final)
  assert num_lines == 8
  for is_marked in (True, False):
    if not is_marked:
      mark.unlink()
    assert output.merge(tmp_path) == [(final, 8)]
    assert final.read_bytes() == merged
  mark.unlink()
  final.write_text('other\n')
  with pytest.raises(ValueError, match='already exists'):
    output.merge(tmp_path)
  assert final.read_text() == 'other\n'
