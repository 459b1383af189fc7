"""What is handed out: an archive of the source, and the wheel made of it."""

import json
import pathlib
import shutil
import subprocess
import sys
import sysconfig
import venv
import zipfile

import pytest

from tests import children

pytest.importorskip('build')
pytest.importorskip('sentencepiece')
pytest.importorskip('twine')

pytestmark = pytest.mark.slow
SOURCE = ('LICENSE', 'README.md', 'pyproject.toml', 'setup.py')
PACKAGES = ('gin_configs', 'specdec_jax')


def call(*command, cwd: pathlib.Path) -> str:
  """Standard output of a command that does not see the checkout."""
  environment = children.environment()
  del environment['PYTHONPATH']
  done = subprocess.run(
    command, cwd=cwd, env=environment, capture_output=True, text=True
  )
  assert done.returncode == 0, done.stdout + done.stderr
  return done.stdout


@pytest.fixture(scope='module')
def built(tmp_path_factory) -> pathlib.Path:
  """The folder of both. Building writes beside the source: it has a copy."""
  folder = tmp_path_factory.mktemp('built')
  source = folder / 'source'
  source.mkdir()
  for name in SOURCE:
    shutil.copy(children.ROOT / name, source)
  for name in PACKAGES:
    ignore = shutil.ignore_patterns('__pycache__')
    shutil.copytree(children.ROOT / name, source / name, ignore=ignore)
  out = folder / 'dist'
  command = (sys.executable, '-m', 'build', '--no-isolation', '--outdir', out)
  call(*command, source, cwd=folder)
  return out


def test_both_are_fit_for_the_package_index(built):
  files = sorted(built.iterdir())
  assert [path.suffix for path in files] == ['.whl', '.gz']
  check = (sys.executable, '-m', 'twine', 'check', '--strict')
  assert call(*check, *files, cwd=built).count('PASSED') == 2


def test_a_wheel_has_every_file_of_the_package(built):
  [wheel] = built.glob('*.whl')
  found = {pathlib.PurePosixPath(x) for x in zipfile.ZipFile(wheel).namelist()}
  # A top-level `gin_configs` could be another project's as well.
  package = pathlib.PurePosixPath('specdec_jax')
  parents = {'gin_configs': package, 'specdec_jax': package.parent}
  expected = {
    parents[name] / path.relative_to(children.ROOT).as_posix()
    for name in PACKAGES
    for path in (children.ROOT / name).rglob('*')
    if path.is_file() and path.suffix != '.pyc'
  }
  info = {path for path in found if path.parts[0].endswith('.dist-info')}
  assert found - info == expected
  # T5X leaves the search to gin, which looks in Python's packages.
  folders = {path.parent for path in expected if path.suffix == '.gin'}
  assert folders
  assert {path / '__init__.py' for path in folders} <= expected


def environment(folder: pathlib.Path, *install) -> tuple[pathlib.Path, str]:
  """An environment with the package, which sees the other packages of this one:
  its Python and its site-packages."""
  venv.create(folder, with_pip=False)
  python = folder / 'bin' / 'python'
  [site] = folder.glob('lib/python*/site-packages')
  (site / 'others.pth').write_text(sysconfig.get_path('purelib'))
  pip = (sys.executable, '-m', 'pip', '--python', python, 'install')
  call(*pip, '--no-index', '--no-deps', *install, cwd=folder)
  return python, str(site)


def test_an_installed_wheel_decodes(built, tmp_path):
  python, site = environment(tmp_path, *built.glob('*.whl'))
  specdec = (tmp_path / 'bin' / 'specdec', 'generate', '--prompt', 'A library')
  choices = ('--model', 'lm-nano', '--max_new_tokens', '4', '--json', '-')
  found = json.loads(call(*specdec, *choices, cwd=tmp_path))
  assert len(found['tokens']) == 4
  where = 'import specdec_jax; print(specdec_jax.__file__)'
  assert call(python, '-c', where, cwd=tmp_path).startswith(site)


def test_a_script_beside_a_clone_imports_the_package(built, tmp_path):
  """A clone has the package's name, and no `__init__.py`."""
  clone, script = tmp_path / 'specdec_jax', tmp_path / 'script.py'
  shutil.copytree(built.parent / 'source', clone)
  install = ('--no-build-isolation', '--editable', clone)
  python, _ = environment(tmp_path / 'environment', *install)
  script.write_text('import specdec_jax; print(specdec_jax.__file__)')
  found = call(python, script, cwd=tmp_path).strip()
  assert found == str(clone / 'specdec_jax' / '__init__.py')
