"""The layers of docs/design.md, read from the imports themselves."""

import ast
import pathlib
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).parent.parent
PACKAGE = ROOT / 'specdec_jax'
FILES = sorted(PACKAGE.rglob('*.py'))

# The core: each part may import its own layer and those below it.
LAYERS = {
  'base': 0,
  'lazy': 0,
  'theory': 0,
  'files': 0,
  'launch': 0,
  'verification': 1,
  'arrays': 1,
  'trees': 1,
  'sampling': 1,
  'decoding': 2,
  'drafters': 2,
  'models': 3,
  'sharding': 3,
  'checkpoints': 4,
  'text': 4,
  'assembly': 5,
  'cli': 6,
}
# The extras: folders that can be deleted. No file of the core imports one.
EXTRAS = {
  'audit',
  'contrib/beams',
  'contrib/block_heads',
  'contrib/ngram',
  'contrib/top_beta',
  'infer',
  'integrations/t5x',
  'integrations/tunix',
  'measure',
  'planning',
  'trace',
  'training',
}
# What an extra may import of other extras.
BETWEEN_EXTRAS = {
  # Training texts are written as `infer` decodes.
  'training': {'infer'},
  # `num_decodes` runs a beam search.
  'infer': {'contrib/beams'},
}
# Which other parts these may import: none, but for one.
ALONE = {'theory': (), 'files': (), 'lazy': (), 'launch': ('files',)}
# Files of the extra `audit` that work without jax and the rest of the package.
WITHOUT_JAX = ('audit/auditing', 'audit/goodness_of_fit', 'audit/report')
# Extras with commands of their own.
COMMANDS = {'audit', 'infer', 'measure', 'planning', 'trace', 'training'}
# Who may import a third party, and whether only inside functions.
RESTRICTED = {
  'flax.linen': ({'models', 'training', 'integrations', 'contrib'}, False),
  'tensorflow': ({'text'}, True),
  'seqio': ({'text'}, True),
  'argparse': ({'cli', 'launch', *COMMANDS}, False),
  'gin': ({'launch', 'integrations', 'assembly'}, False),
  'optax': ({'training'}, False),
  'grain': ({'training'}, True),
  'gguf': ({'checkpoints'}, True),
  'safetensors': ({'checkpoints'}, True),
  'tensorstore': ({'checkpoints'}, True),
  'sentencepiece': ({'text'}, True),
  'llguidance': ({'text'}, True),
  'huggingface_hub': ({'checkpoints'}, True),
  'tokenizers': ({'text', 'checkpoints'}, True),
  'rich': ({'cli', 'launch', 'trace', 'infer'}, True),
  'matplotlib': ({'measure'}, True),
  'gcsfs': ({'files'}, False),
  'fsspec': ({'files'}, False),
}

MOST_LINES, MOST_LINES_OF_FUNCTIONS = 500, 80
# Functions that document a public call: the limit is for the rest of them.
PUBLIC_CALLS = {
  'specdec_jax/assembly/api.py:generate',
  'specdec_jax/assembly/api.py:load',
  'specdec_jax/audit/auditing.py:audit',
  'specdec_jax/training/train.py:train',
}


def imports(path: pathlib.Path) -> list[tuple[str, bool]]:
  """Dotted names that a file imports, and whether inside a function, or for
  types alone: not when the file is."""
  found = []

  def visit(node: ast.AST, is_inside: bool) -> None:
    if isinstance(node, ast.Import):
      found.extend((alias.name, is_inside) for alias in node.names)
    if isinstance(node, ast.ImportFrom):
      found.extend(
        (f'{node.module}.{alias.name}', is_inside) for alias in node.names
      )
    if isinstance(node, ast.Call) and _is_require(node.func):
      found.append((node.args[0].value, is_inside))
    is_later = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    if isinstance(node, ast.If):
      is_later = ast.unparse(node.test) == 'TYPE_CHECKING'
    for child in ast.iter_child_nodes(node):
      visit(child, is_inside or is_later)

  visit(ast.parse(path.read_text(encoding='utf-8')), False)
  return found


def _is_require(function: ast.expr) -> bool:
  """Whether it is `files.require.require`, which imports a package."""
  return ast.unparse(function) in ('require', 'packages.require')


def part_of(path: pathlib.Path) -> str:
  """The folder or module of the package that a file belongs to."""
  return path.relative_to(PACKAGE).parts[0].removesuffix('.py')


def extra_of(name: str) -> str | None:
  """The extra that a file or module of the package belongs to, such as
  `contrib/ngram` for `contrib/ngram/choice.py`; None for the core."""
  name = name.replace('.', '/')
  for extra in EXTRAS:
    if name == extra or name.startswith(f'{extra}/'):
      return extra
  return None


def relative(path: pathlib.Path) -> str:
  return str(path.relative_to(ROOT))


def violations(path: pathlib.Path) -> list[str]:
  part = part_of(path)
  if part in ('__init__', '__main__') or path.parent.name == 'contrib':
    return []
  inside = path.relative_to(PACKAGE).with_suffix('').as_posix()
  own_extra = extra_of(inside)
  wrong = []
  for name, is_inside in imports(path):
    if name.split('.')[0] in ('experiments', 'tests'):
      wrong.append(f'{part} imports {name}, which no wheel has')
    if name.startswith('specdec_jax.'):
      wrong += _wrong_import(part, own_extra, name)
    is_numpy_only = part == 'theory' or inside in WITHOUT_JAX
    if is_numpy_only and name.split('.')[0] == 'jax':
      wrong.append(f'{inside} imports jax')
    for package, (parts, only_inside) in RESTRICTED.items():
      if name == package or name.startswith(f'{package}.'):
        if part not in parts:
          wrong.append(f'{part} imports {package}')
        elif only_inside and not is_inside:
          wrong.append(f'{part} imports {package} outside a function')
  return wrong


def _wrong_import(part: str, own_extra: str | None, name: str) -> list[str]:
  """Says what is wrong with an import of a module of the package, if anything
  is."""
  other_extra = extra_of(name.removeprefix('specdec_jax.'))
  if other_extra is not None:
    if own_extra is None:
      return [f'the core imports {name}, of an extra']
    allowed = {own_extra, *BETWEEN_EXTRAS.get(own_extra, ())}
    if other_extra not in allowed:
      return [f'the extra {own_extra} imports {name}, of another']
    return []
  if own_extra is not None:
    return []
  other = name.split('.')[1]
  wrong = []
  if LAYERS[other] > LAYERS[part]:
    wrong.append(f'{part} imports {other}, which lies above it')
  if part in ALONE and other not in (part, *ALONE[part]):
    wrong.append(f'{part} imports {other}')
  return wrong


@pytest.mark.parametrize('path', FILES, ids=relative)
def test_imports_point_downwards(path):
  assert violations(path) == []


def test_every_part_has_a_layer_or_is_an_extra():
  for path in FILES:
    part = part_of(path)
    inside = path.relative_to(PACKAGE).with_suffix('').as_posix()
    is_package_file = path.name == '__init__.py' or part == '__main__'
    assert part in LAYERS or extra_of(inside) or is_package_file, inside


def test_a_violation_is_seen(tmp_path, monkeypatch):
  monkeypatch.setitem(globals(), 'PACKAGE', tmp_path)
  path = tmp_path / 'drafters' / 'bad.py'
  path.parent.mkdir()
  path.write_text(
    'import flax.linen as nn\n'
    'from specdec_jax.models import llama\n'
    'def f():\n  import tensorflow\n'
    'gguf = require("gguf", extra="models", purpose="this")\n'
  )
  assert len(violations(path)) == 4


@pytest.mark.parametrize(
  ('part', 'line', 'is_wrong'),
  [
    ('launch', 'from specdec_jax.files import paths', False),
    ('launch', 'from specdec_jax import base', True),
    ('files', 'from specdec_jax.launch import progress', True),
    ('theory', 'from specdec_jax.audit import report', True),
    ('cli', 'from specdec_jax.trace import page', True),
    ('trace', 'from specdec_jax.cli import wording', False),
    ('planning', 'from specdec_jax.measure import stopwatch', True),
    ('planning', 'from specdec_jax.drafters import always_full', False),
    ('contrib/ngram', 'from specdec_jax.contrib.beams import trie', True),
    ('training', 'def f():\n  import seqio', True),
    ('text', 'def f():\n  import seqio', False),
  ],
)
def test_what_stands_alone_is_told(tmp_path, monkeypatch, part, line, is_wrong):
  monkeypatch.setitem(globals(), 'PACKAGE', tmp_path)
  path = tmp_path / part / 'some.py'
  path.parent.mkdir(parents=True)
  path.write_text(line)
  assert len(violations(path)) == is_wrong


def too_long(path: pathlib.Path) -> list[str]:
  """Names the functions of a file that are too long, and the file if it is."""
  text = path.read_text(encoding='utf-8')
  name = path.relative_to(ROOT).as_posix()
  num_lines = len(text.splitlines())
  wrong = []
  if num_lines > MOST_LINES:
    wrong.append(f'{name} has {num_lines} lines')
  for node in ast.walk(ast.parse(text)):
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
      function = f'{name}:{node.name}'
      num_lines = node.end_lineno - node.lineno + 1
      if function in PUBLIC_CALLS:
        num_lines -= len(ast.get_docstring(node).splitlines())
      if num_lines > MOST_LINES_OF_FUNCTIONS:
        wrong.append(f'{function} has {num_lines} lines')
  return wrong


@pytest.mark.parametrize('folder', ['specdec_jax', 'tests', 'experiments'])
def test_files_and_functions_are_short(folder):
  paths = sorted((ROOT / folder).rglob('*.py'))
  assert [name for path in paths for name in too_long(path)] == []


def test_a_long_file_and_a_long_function_are_seen(tmp_path, monkeypatch):
  monkeypatch.setitem(globals(), 'ROOT', tmp_path)
  path = tmp_path / 'some.py'
  lines = ['def short():', *['  pass'] * 79, 'def long():', *['  pass'] * 80]
  lines += ['# At the end.'] * (500 - len(lines))
  path.write_text('\n'.join(lines))
  assert too_long(path) == ['some.py:long has 81 lines']
  path.write_text('\n'.join([*lines, '# Beyond it.']))
  assert too_long(path) == [
    'some.py has 501 lines',
    'some.py:long has 81 lines',
  ]


def test_commands_are_listed_without_what_they_use():
  """Extras that are only named in the table of commands are not imported."""
  program = (
    'import sys\n'
    'from specdec_jax.cli.main import main\n'
    'try:\n'
    '  main(["--help"])\n'
    'finally:\n'
    '  heavy = {"scipy.stats", "specdec_jax.audit", "specdec_jax.planning"}\n'
    '  print("imported:", sorted(heavy & set(sys.modules)))\n'
  )
  result = subprocess.run(
    [sys.executable, '-c', program],
    cwd=ROOT,
    capture_output=True,
    text=True,
    check=False,
  )
  assert 'audit' in result.stdout
  assert result.stdout.endswith('imported: []\n'), result


def test_import_is_light_and_quick():
  program = (
    'import sys, time, specdec_jax;'
    'heavy = {"flax.linen", "tensorflow", "seqio", "gin", "gguf", "rich",'
    ' "gcsfs"};'
    # Its own time, whatever else the machine is doing.
    'print(time.process_time(), sorted(heavy & set(sys.modules)))'
  )
  seconds = []
  for _ in range(3):
    result = subprocess.run(
      [sys.executable, '-c', program],
      cwd=ROOT,
      capture_output=True,
      text=True,
      check=True,
    )
    taken, heavy = result.stdout.split(maxsplit=1)
    assert heavy.strip() == '[]'
    seconds.append(float(taken))
    if seconds[-1] < 2:
      break
  assert min(seconds) < 2, seconds
