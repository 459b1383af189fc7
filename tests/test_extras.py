"""The core stands alone: each extra can be deleted, with its tests.

For each extra a copy of the package is made without the extra's folder and its
tests. In the copy, every module of the core is imported, the layers hold, a
small model decodes, and the command line says which commands are left.
"""

import pathlib
import shutil
import subprocess
import sys

import pytest

from tests import children
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
PROGRAM = """
import contextlib, importlib, io, pathlib, pkgutil, sys
import specdec_jax
from specdec_jax.cli.main import main
from tests import test_layering
from tests.cli import tiny

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
for command in sys.argv[1:]:
  assert main([command, '--help']) == 2
"""


def copy_without(extra: str, folder: pathlib.Path) -> pathlib.Path:
  """Copies the package and its tests, but for one extra and its tests."""
  for name in ('specdec_jax', 'tests', 'gin_configs'):
    shutil.copytree(
      ROOT / name,
      folder / name,
      ignore=shutil.ignore_patterns('__pycache__', 'pretrained'),
    )
  for name in ('pyproject.toml', 'setup.py', 'README.md'):
    shutil.copy(ROOT / name, folder)
  (folder / 'specdec_jax' / 'pretrained').symlink_to(
    ROOT / 'specdec_jax' / 'pretrained'
  )
  for place in ('specdec_jax', 'tests'):
    shutil.rmtree(folder / place / extra, ignore_errors=True)
  assert not (folder / 'specdec_jax' / extra).exists()
  return folder


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


@pytest.mark.parametrize('extra', sorted(EXTRAS))
def test_the_core_stands_without(extra, tmp_path):
  folder = copy_without(extra, tmp_path)
  commands = COMMANDS.get(extra, [])
  result = run_in(folder, '-c', PROGRAM, *commands)
  assert result.returncode == 0, result.stderr
  listed = {line.split()[0] for line in result.stdout.splitlines() if line}
  for name in sum(COMMANDS.values(), ['generate', 'chat', 'convert', 'doctor']):
    assert (name in listed) == (name not in commands), result.stdout
  for command in commands:
    told = f'{command} is a command of the extra {extra}, whose folder'
    assert told in result.stderr
