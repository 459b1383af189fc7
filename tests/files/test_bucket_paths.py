"""What a path of a bucket does, and that a local path does the same."""

import pathlib

import pytest

from specdec_jax.files import paths, replacing
from specdec_jax.files.one_writer import one_writer
from specdec_jax.files.paths import is_in_bucket, local_path, user_path


@pytest.fixture(params=['local', 'bucket'])
def root(request, tmp_path):
  if request.param == 'local':
    return tmp_path
  return user_path(request.getfixturevalue('bucket')) / 'root'


def write(path, data: bytes):
  """A file in a folder that may be new."""
  path.parent.mkdir(parents=True, exist_ok=True)
  path.write_bytes(data)
  return path


def fail_in(context, *name: str) -> None:
  """Writes what a context yields, or a file in it, and fails."""
  with context as begun:
    begun.joinpath(*name).write_text('new')
    raise KeyError


def test_what_is_there(root):
  path = write(root / 'a' / 'b.txt', b'text')
  assert (path.exists(), path.is_file(), path.is_dir()) == (True, True, False)
  for folder in (root, root / 'a'):
    assert (folder.exists(), folder.is_file(), folder.is_dir()) == (
      (True, False, True)
    )
  for absent in (root / 'a' / 'b', root / 'a' / 'b.txt' / 'c', root / 'x'):
    assert not absent.exists()
    assert not absent.is_file()
    assert not absent.is_dir()


def test_names_and_contents(root):
  path = write(root / 'a' / 'b [1].txt', 'ä\r\nb'.encode())
  write(root / 'a' / 'c.gin', b'')
  write(root / 'a' / 'sub' / 'd.txt', b'')
  assert (path.name, path.stem, path.suffix) == ('b [1].txt', 'b [1]', '.txt')
  assert path.parent == root / 'a'
  assert path.with_name('e') == root / 'a' / 'e'
  assert user_path(str(path)) == path
  assert user_path(path) == path
  assert {each.name for each in (root / 'a').iterdir()} == (
    {'b [1].txt', 'c.gin', 'sub'}
  )
  assert [*(root / 'a').glob('*.txt')] == [path]
  assert [*(root / 'nowhere').glob('*')] == []
  assert path.read_bytes() == 'ä\r\nb'.encode()
  assert path.read_text(encoding='utf-8') == 'ä\nb'
  with path.open(encoding='utf-8', newline='\n') as file:
    assert file.read() == 'ä\r\nb'
  assert bytes(paths.mapped(path)[1:3]) == 'ä\r\nb'.encode()[1:3]
  assert paths.mapped(path).size == 5
  assert bytes(paths.mapped(root / 'a' / 'c.gin')[:4]) == b''
  with pytest.raises(FileNotFoundError) as raised:
    (root / 'nowhere').read_bytes()
  assert raised.value.filename == str(root / 'nowhere')


def test_removal(root):
  first = write(root / 'a' / 'b', b'')
  write(root / 'a' / 'sub' / 'c', b'')
  other = write(root / 'ab', b'')
  first.unlink()
  first.unlink(missing_ok=True)
  with pytest.raises(FileNotFoundError):
    first.unlink()
  for _ in range(2):
    paths.remove_tree(root / 'a')
    assert not (root / 'a').exists()
  assert other.exists()


@pytest.mark.parametrize('name', ['a[bc]', 'a*', 'a?', 'a[!x]', 'a[', 'a**'])
def test_names_are_no_patterns(root, name):
  """What is removed or moved, and nothing that its name would match."""
  others = [write(root / other / 'd' / 'e', b'') for other in ('ab', 'ac', 'a')]
  for is_moved in (True, False):
    path = write(root / name / 'd' / '[e]', b'text')
    assert not [*(root / name).glob('e*')]
    if is_moved:
      (root / name).rename(root / 'new[1]')
      assert (root / 'new[1]' / 'd' / '[e]').read_bytes() == b'text'
    else:
      paths.remove_tree(root / name)
    assert not path.exists()
    assert all(other.exists() for other in others)


def test_a_file_appears_when_it_is_complete(root):
  root.mkdir(parents=True, exist_ok=True)
  path = root / 'a'
  with replacing.file(path) as begun:
    begun.write_text('old')
    assert not path.exists()
  with pytest.raises(KeyError):
    fail_in(replacing.file(path))
  assert path.read_text() == 'old'
  kept: list[pathlib.Path] = []
  with pytest.raises(KeyError):
    fail_in(replacing.file(path, on_failure=kept.append))
  assert [each.read_text() for each in kept] == ['new']
  assert path.read_text() == 'old'


def test_a_folder_is_replaced(root):
  root.mkdir(parents=True, exist_ok=True)
  folder = root / 'a'
  with replacing.new_folder(folder) as begun:
    (begun / 'b').write_text('old')
  with pytest.raises(ValueError, match='already exists'):
    replacing.new_folder(folder).__enter__()
  with replacing.new_folder(folder, overwrite=True) as begun:
    (begun / 'c').write_text('new')
  assert [each.name for each in folder.iterdir()] == ['c']
  with pytest.raises(KeyError):
    fail_in(replacing.new_folder(root / 'other'), 'c')
  assert not (root / 'other').exists()


def test_a_folder_with_a_mark(root):
  root.mkdir(parents=True, exist_ok=True)
  folder = root / 'a'
  with replacing.folder(folder, 'mark', overwrite=False) as begun:
    for name in ('mark', 'other'):
      (begun / name).write_text(name)
    assert not (folder / 'mark').exists()
  assert {each.name for each in folder.iterdir()} == {'mark', 'other'}
  with pytest.raises(ValueError, match='add --overwrite'):
    replacing.folder(folder, 'mark', overwrite=False).__enter__()
  with replacing.folder(folder, 'mark', overwrite=True) as begun:
    (begun / 'mark').write_text('new')
  assert [each.read_text() for each in folder.iterdir()] == ['new']


def test_a_bucket_has_no_locks(bucket):
  lock = user_path(bucket) / 'lock'
  with one_writer(lock, 'out'), one_writer(lock, 'out'):
    pass
  assert not lock.exists()


def test_a_folder_that_a_killed_process_was_writing(bucket):
  """It says so, and the next one begins it anew."""
  folder = user_path(bucket) / 'model'
  killed = replacing.new_folder(folder)
  write(killed.__enter__() / 'a' / 'part', b'')
  assert replacing.is_begun(folder)
  with replacing.new_folder(folder) as begun:
    write(begun / 'b', b'')
  assert [path.name for path in folder.iterdir()] == ['b']
  assert not replacing.is_begun(folder)


def test_a_folder_whose_upload_was_killed(bucket, monkeypatch):
  """The same command writes it again; a whole or a foreign one stays."""
  folder = user_path(bucket) / 'tokens'
  upload = type(folder).upload

  def written(*names) -> set[str]:
    with replacing.folder(folder, 'mark', overwrite=False) as begun:
      for name in names:
        (begun / name).write_text(name)
    return {path.name for path in folder.iterdir()}

  def killed(self, source):
    upload(self, source)
    raise GeneratorExit  # Nothing is cleaned up, as after a kill.

  with monkeypatch.context() as patch:
    patch.setattr(type(folder), 'upload', killed)
    with pytest.raises(GeneratorExit):
      written('mark', 'old')
  assert replacing.is_begun(folder)
  assert (folder / 'old').exists()
  assert written('mark', 'new') == {'mark', 'new'}
  with pytest.raises(ValueError, match='add --overwrite'):
    written('mark')
  (folder / 'mark').unlink()
  with pytest.raises(ValueError, match='holds something else'):
    written('mark')


def test_the_first_one_stands(bucket):
  path = user_path(bucket) / 'a'
  assert path.create('first')
  assert not path.create('second')
  assert path.read_text() == 'first'


def test_a_bucket_itself(bucket):
  path = user_path(bucket)
  assert path.is_dir()
  assert [*path.iterdir()] == []
  write(path / 'a', b'')
  assert [*path.iterdir()] == [path / 'a']
  with pytest.raises(ValueError, match='whole bucket'):
    paths.remove_tree(path)
  with pytest.raises(ValueError, match='local disk'):
    local_path(path)
  assert is_in_bucket(user_path(pathlib.Path(bucket)))
