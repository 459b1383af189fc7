"""Names are nouns of the field: few are pronouns, participles or vague nouns.

`config`, `logits` and `drafter` say what a variable holds; `found`, `own` and
`each` make readers look it up. See the house rules in CONTRIBUTING.md.
"""

import ast
import collections
import pathlib

import pytest

PACKAGE = pathlib.Path(__file__).parent.parent / 'specdec_jax'
# Words that say nothing of what a variable holds.
VAGUE = frozenset(
  (
    *('found', 'made', 'given', 'own', 'known', 'kept', 'due'),
    *('said', 'told', 'unsaid', 'unset_'),
    *('each', 'these', 'those', 'other', 'others', 'whole'),
    *('way', 'ways', 'side', 'sides', 'kind', 'kinds'),
  )
)
# The largest share of vague names in a folder, in percent.
LIMIT = 1.0
# Top-level files together count as a folder.
TOP = '.'


def bound_names(text: str) -> list[str]:
  """Returns all names that Python code binds: variables and parameters."""
  names = []
  for node in ast.walk(ast.parse(text)):
    if isinstance(node, ast.arg):
      names.append(node.arg)
    elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
      names.append(node.id)
  return names


def is_vague(name: str) -> bool:
  """Returns whether a name, with underscores around it or not, is vague."""
  return name in VAGUE or name.strip('_') in VAGUE


def counted() -> dict[str, tuple[int, int]]:
  """Returns the numbers of names and of vague ones in each folder."""
  num_names: collections.Counter[str] = collections.Counter()
  num_vague: collections.Counter[str] = collections.Counter()
  for path in PACKAGE.rglob('*.py'):
    folder, *rest = path.relative_to(PACKAGE).parts
    names = bound_names(path.read_text(encoding='utf-8'))
    key = folder if rest else TOP
    num_names[key] += len(names)
    num_vague[key] += sum(map(is_vague, names))
  return {key: (num, num_vague[key]) for key, num in num_names.items()}


COUNTED = counted()


@pytest.mark.parametrize('folder', sorted(COUNTED))
def test_few_names_are_vague(folder):
  num_names, num_vague = COUNTED[folder]
  assert num_vague <= LIMIT / 100 * num_names


def test_all_bindings_are_counted():
  text = """
def f(found, *own, kind=1, **others):
  made: int = found.given  # An attribute that is read binds nothing.
  for each in made:
    with each as (side, _kept):
      total = [way for way in side if (known := way)]
  said(total, whole=kind)
"""
  names = bound_names(text)
  assert sorted(names) == [
    *('_kept', 'each', 'found', 'kind', 'known', 'made', 'others', 'own'),
    *('side', 'total', 'way'),
  ]
  assert [name for name in names if not is_vague(name)] == ['total']
