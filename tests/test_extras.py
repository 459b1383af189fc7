"""The core stands alone: each extra can be deleted, with its tests, and so can
all of them.

For each extra, the package and its tests are copied without the extra's folder
and its tests, as `git rm -r` leaves them. In the copy the core's tests are
collected and run:

- always: modules of the core are imported, the layers hold, a small model
  decodes, the command line names what is absent, and every test is collected;
- `slow`: the files of tests that name the extra or a table with rows of it,
  such as those of the contracts, and the six lines of README;
- `without_extras` (`make test-all`): all tests of the core that `make test`
  runs.
"""

import pathlib
import re
import shutil
import subprocess
import sys

import pytest

from specdec_jax import lazy
from tests import children, conftest
from tests.test_layering import EXTRAS

ROOT = pathlib.Path(__file__).parent.parent
# The commands that each extra has.
COMMANDS = {
  'audit': ['audit'],
  'infer': ['eval', 'infer', 'merge'],
  'measure': ['bench', 'calibrate'],
  'planning': ['plan'],
  'trace': ['trace'],
  'training': ['data', 'train'],
}
# A case without any extra.
ALL = 'all extras'
CASES = [*sorted(EXTRAS), ALL]
# Tests of the repository: its pages, experiments and packages. Whoever deletes
# an extra also edits those that name it.
REPOSITORY = {
  'experiments',
  'test_deploy.py',
  'test_docs.py',
  'test_extras.py',
  'test_notebooks.py',
  'test_wheel.py',
}
# A path in a table of what may be absent, such as `tests.infer.doors:gin`.
LAZY_PATH = re.compile(r"'((?:tests|specdec_jax)(?:\.\w+)+):(\w+)'")
PROGRAM = """
import contextlib, importlib, io, pathlib, pkgutil, sys
import pytest
import specdec_jax
from specdec_jax.cli.main import main
from tests import test_layering
from tests.cli import tiny

commands, tests = (words.split() for words in sys.argv[1:])

for module in pkgutil.walk_packages(specdec_jax.__path__, 'specdec_jax.'):
  name = module.name.removeprefix('specdec_jax.')
  if test_layering.extra_of(name) is None and name != '__main__':
    importlib.import_module(module.name)
for path in test_layering.FILES:
  assert not test_layering.violations(path), path

model = str(tiny.write_model(pathlib.Path('tiny')))
decoder = specdec_jax.load(model, drafter='prompt_lookup', gamma=3)
[text] = specdec_jax.generate(decoder, ['the in the in'], max_new_tokens=8)
assert text.statistics['tokens'] == 8, text.statistics

printed = io.StringIO()
with contextlib.redirect_stdout(printed):
  assert main(['--help']) == 0
print(printed.getvalue())
for command in commands:
  assert main([command, '--help']) == 2
sys.exit(pytest.main(['--collect-only', *tests]))
"""


def deleted(case: str) -> list[str]:
  """The extras that are deleted in a case."""
  return sorted(EXTRAS) if case == ALL else [case]


@pytest.fixture
def copy_without(tmp_path, request):
  """Copies the package and its tests, but for the extras of a case and their
  tests."""

  def call(case: str) -> pathlib.Path:
    for name in ('specdec_jax', 'tests', 'gin_configs', 'experiments/prompts'):
      shutil.copytree(
        ROOT / name,
        tmp_path / name,
        ignore=shutil.ignore_patterns('__pycache__', 'pretrained'),
      )
    for name in ('pyproject.toml', 'setup.py', 'README.md'):
      shutil.copy(ROOT / name, tmp_path)
    pretrained = pathlib.Path('specdec_jax', 'pretrained')
    (tmp_path / pretrained).symlink_to(ROOT / pretrained)
    for extra in deleted(case):
      for place in ('specdec_jax', 'tests'):
        shutil.rmtree(tmp_path / place / extra)
        # `git rm` leaves compiled files, and so the folders.
        (tmp_path / place / extra / '__pycache__').mkdir(parents=True)
    compiled = conftest.compiled_folder(request.config)
    if compiled is not None:
      (tmp_path / '.pytest_cache' / 'd').mkdir(parents=True)
      cached = tmp_path / '.pytest_cache' / 'd' / compiled.parent.name
      cached.symlink_to(compiled.parent)
    return tmp_path

  return call


def run_in(
  folder: pathlib.Path, *arguments: str
) -> subprocess.CompletedProcess:
  """Runs Python in a copy, which comes before this checkout."""
  environment = children.environment() | {'PYTHONPATH': str(folder)}
  return subprocess.run(
    [sys.executable, *arguments],
    cwd=folder,
    env=environment,
    capture_output=True,
    text=True,
    check=False,
  )


def run_tests(folder: pathlib.Path, *tests: str) -> str:
  """Runs quick tests in a copy, which should pass; returns what pytest
  printed."""
  quick = 'not slow and not campaign'
  result = run_in(folder, '-m', 'pytest', '--quick', '-m', quick, *tests)
  assert result.returncode == 0, result.stdout[-8000:] + result.stderr[-2000:]
  return result.stdout


def core_tests() -> list[str]:
  """The files and folders of tests that are the core's."""
  folders_of_extras = {extra.split('/')[0] for extra in EXTRAS}
  entries = [*(ROOT / 'tests').glob('test_*.py')]
  entries += [path.parent for path in (ROOT / 'tests').glob('*/__init__.py')]
  return sorted(
    f'tests/{path.name}'
    for path in entries
    if path.name not in folders_of_extras | REPOSITORY
  )


def naming(case: str) -> list[str]:
  """The files of the core's tests that name a deleted extra, or a table beside
  them that does, such as those of the contracts."""
  words = []
  for extra in deleted(case):
    dotted = extra.replace('/', '.')
    words += [f"'{extra}'", f'specdec_jax.{dotted}', f'tests.{dotted}']
  is_naming = re.compile('|'.join(map(re.escape, words))).search
  tests = set()
  for entry in core_tests():
    path = ROOT / entry
    for file in [path] if path.is_file() else path.rglob('*.py'):
      if not is_naming(file.read_text(encoding='utf-8')):
        continue
      beside = [file]
      if not file.name.startswith('test_'):
        beside = [
          test
          for test in file.parent.glob('test_*.py')
          if re.search(rf'\b{file.stem}\b', test.read_text(encoding='utf-8'))
        ]
      tests |= {str(test.relative_to(ROOT)) for test in beside}
  return sorted(tests)


@pytest.mark.parametrize('case', CASES)
def test_the_core_stands_without(case, copy_without):
  folder = copy_without(case)
  extra_of_command = {
    command: extra
    for extra in deleted(case)
    for command in COMMANDS.get(extra, [])
  }
  commands = sorted(extra_of_command)
  words = ' '.join(commands), ' '.join(core_tests())
  result = run_in(folder, '-c', PROGRAM, *words)
  assert result.returncode == 0, result.stdout[-8000:] + result.stderr
  listed = {line.split()[0] for line in result.stdout.splitlines() if line}
  for name in sum(COMMANDS.values(), ['generate', 'chat', 'convert', 'doctor']):
    assert (name in listed) == (name not in commands), result.stdout
  for command, extra in extra_of_command.items():
    sentence = f'{command} is a command of the extra {extra}, whose folder'
    assert sentence in result.stderr


@pytest.mark.slow
@pytest.mark.parametrize('case', CASES)
def test_what_names_an_extra_passes_without(case, copy_without):
  folder = copy_without(case)
  printed = run_tests(folder, *naming(case))
  assert int(re.findall(r'(\d+) passed', printed)[0]) > 100


@pytest.mark.slow
@pytest.mark.smollm2
@pytest.mark.parametrize('case', CASES)
def test_the_lines_of_readme_run_without(case, copy_without):
  text = (ROOT / 'README.md').read_text(encoding='utf-8')
  program, printed = re.search(
    r'^```python\n(.*?)^```$.*?^```\n(.*?)^```$', text, re.M | re.S
  ).groups()
  result = run_in(copy_without(case), '-c', program)
  assert (result.returncode, result.stdout) == (0, printed), result.stderr


@pytest.mark.without_extras
@pytest.mark.parametrize('case', CASES)
def test_the_tests_of_the_core_pass_without(case, copy_without):
  run_tests(copy_without(case), *core_tests())


def test_what_deleted_packages_leave_is_not_installed(tmp_path, monkeypatch):
  """Folders of compiled files, in a package that nothing has imported."""
  for folder in ('there/inner', 'there/deleted/inner/__pycache__'):
    (tmp_path / 'some_package' / folder).mkdir(parents=True)
  for name in ('__init__', 'there/__init__', 'there/inner/module'):
    (tmp_path / 'some_package' / f'{name}.py').write_text('')
  monkeypatch.syspath_prepend(tmp_path)
  for name in ('there', 'there.inner.module'):
    assert lazy.is_installed(f'some_package.{name}')
  for name in ('there.inner', 'there.deleted', 'there.deleted.inner.module'):
    assert not lazy.is_installed(f'some_package.{name}')
  assert 'some_package' not in sys.modules


def test_rows_of_extras_that_are_there_are_found():
  """A table leaves out what is absent, but not what was renamed."""
  files = [*(ROOT / 'tests').rglob('*.py')]
  files += (ROOT / 'specdec_jax').rglob('*.py')
  paths = {
    match
    for file in files
    for match in LAZY_PATH.findall(file.read_text(encoding='utf-8'))
  }
  assert len(paths) > 20
  for module, name in paths:
    folders = module.split('.')
    extras = {'/'.join(folders[1:2]), '/'.join(folders[1:3])} & EXTRAS
    is_there = all((ROOT / folders[0] / extra).exists() for extra in extras)
    if not is_there:
      continue
    path = ROOT.joinpath(*folders)
    file = path / '__init__.py' if path.is_dir() else path.with_suffix('.py')
    assert re.search(
      rf'^(def |class )?{name}\b', file.read_text(encoding='utf-8'), re.M
    ), f'{module} has no {name}'
