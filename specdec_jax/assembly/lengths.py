"""How much is drafted per iteration: one value for every entry point.

Users give it by options that exclude each other (`gamma`, `tree`,
`num_continuations`); `of` makes one value of them and refuses contradictions.
The package reads that value alone.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

from specdec_jax import trees
from specdec_jax.assembly.option_fields import option
from specdec_jax.base import Tree
from specdec_jax.drafters.continuations import tree_of_copies
from specdec_jax.drafters.stateless import MAX_GAMMA, check_gamma
from specdec_jax.launch.numbers import literal, number, positive_int
from specdec_jax.theory import trees as theory

AUTO = 'auto'
_TREES = (
  'a number of nodes, the parents of nodes 1, 2, ..., such as 0,0,1, or their '
  'paths, such as [(0,), (1,), (0, 0)]'
)
# As users write them: `Gamma` a number or 'auto'; `Shape` as `_TREES` says. The
# same tree, a root with two children of which the first has one, is
#   parents (0, 0, 1): node 3 hangs from node 1;
#   paths [(0,), (1,), (0, 0)]: node 3 is the first child of the first child.
Gamma = int | str
Shape = int | Sequence[int] | Sequence[Sequence[int]]

gamma_number = number(
  int,
  lambda n: 1 <= n <= MAX_GAMMA,
  f'an integer from 1 to {MAX_GAMMA}, or auto in a command that decodes',
)


def gamma_option(default: int | None = None) -> Any:
  """Makes the field `gamma: Gamma | None` of a choice; None is as `of` says."""
  return option(
    default,
    'drafted tokens per iteration, at most, or auto, the default of commands '
    'that decode: what was measured to be fastest, else plain decoding',
    type=lambda text: AUTO if text == AUTO else gamma_number(text),
  )


def tree_option() -> Any:
  """Makes the field `tree: Shape | None` of a choice."""
  return option(
    None,
    'draft a tree of candidates rather than a chain, which pays on '
    'accelerators with few rows and loses on CPUs: a number of nodes, in the '
    'best shape that is at most gamma deep, or the parents of nodes 1, 2, ..., '
    'such as 0,0,1',
    type=literal(_TREES),
  )


def continuations_option() -> Any:
  """Makes the field `num_continuations: int` of a choice."""
  return option(
    1,
    'several continuations, each of gamma tokens, as a tree',
    type=positive_int,
  )


@dataclasses.dataclass(frozen=True)
class Fixed:
  """Up to `gamma` tokens in every draft; 0 for plain decoding."""

  gamma: int


@dataclasses.dataclass(frozen=True)
class Auto:
  """A fixed gamma that is measured, or was by an earlier run.

  Attributes:
    gammas: what is tried, ascending: 0, then others; best if each gamma + 1
      divides the largest one's (1, 2, 5, 10).
    usual: the gamma where none may be measured; None if 'auto' was given by
      name, which is refused there.
  """

  gammas: tuple[int, ...]
  usual: int | None = None


# What a draft is made for, and what users choose.
Length = Fixed | Tree
LengthChoice = Length | Auto


def of(
  *,
  gamma: Gamma | None,
  usual: int = 4,
  tree: Shape | None = None,
  num_continuations: int = 1,
  tried: Sequence[int] = (1, 3, 7),
) -> LengthChoice:
  """Makes the value from what a user says.

  Args:
    gamma: the most tokens of a draft, or 'auto'; of a tree, its depth. None for
      `usual` if another is given, else for 'auto'.
    usual: gamma if none is given or measured.
    tree: a number of nodes, in the best shape where only a typical alpha is
      known; the parents of nodes 1, 2, ...; or the nodes by the ranks along
      their paths, as in Medusa's and vLLM's settings.
    num_continuations: chains from the root of a tree, each of gamma nodes.
    tried: the gammas that 'auto' tries beside 0.

  Raises:
    ValueError: if two of them contradict each other, or one is out of range.
  """
  are_set = {
    'gamma auto': gamma == AUTO,
    'tree': tree is not None,
    'num_continuations': num_continuations != 1,
  }
  # Each of these settles how much is drafted: at most one may be given.
  names = [name for name, is_set in are_set.items() if is_set]
  if len(names) > 1:
    raise ValueError(
      f'{" and ".join(names)} each say how much is drafted: give one of them'
    )
  if gamma == AUTO:
    return Auto((0, *tried))
  if gamma is None and not names:
    return Auto((0, *tried), usual)
  if gamma is None:
    gamma = usual
  if isinstance(gamma, str):
    raise ValueError(f'gamma {gamma!r} is neither a number nor {AUTO!r}')
  check_gamma(gamma)
  if tree is not None:
    return _tree(tree, gamma)
  if num_continuations != 1:
    return tree_of_copies(gamma, num_continuations)
  return Fixed(gamma)


def depth(length: Length) -> int:
  """Returns the most drafted tokens that an iteration can accept."""
  return trees.depth(length) if isinstance(length, Tree) else length.gamma


def usual(length: LengthChoice) -> LengthChoice:
  """Fixes a gamma that was not given to the one that is used unmeasured."""
  if isinstance(length, Auto) and length.usual is not None:
    return Fixed(length.usual)
  return length


def fixed(length: LengthChoice) -> int:
  """Returns a gamma that cannot vary; ValueError for another length."""
  if not isinstance(length, Fixed):
    raise ValueError(f'this drafter drafts chains of one gamma, not {length}')
  return length.gamma


def _tree(shape: Any, gamma: int) -> Tree:
  # In Python a bool is an int; here it is no number.
  is_number = lambda value: type(value) is int and value >= 0
  try:
    if is_number(shape):
      if not 1 <= shape <= MAX_GAMMA:
        raise ValueError(f'a tree has 1 to {MAX_GAMMA} nodes, got {shape}')
      # Nothing is measured yet: the shape is the best for an assumed alpha.
      rates = theory.assumed_rates(theory.DEFAULT_ALPHA)
      return Tree(theory.best_tree(rates, shape, gamma))
    if isinstance(shape, str) or not isinstance(shape, Sequence):
      raise ValueError(f'{shape!r} is not {_TREES}')
    # (0, 0, 1) are parents; [(0,), (1,), (0, 0)] are paths of the same tree.
    is_path = lambda value: (
      isinstance(value, Sequence) and all(map(is_number, value))
    )
    if all(map(is_number, shape)):
      tree = Tree(tuple(shape))
    elif all(map(is_path, shape)):
      tree = Tree(theory.parents_of([tuple(path) for path in shape]))
    else:
      raise ValueError(f'{shape!r} is not {_TREES}')
    trees.check(tree)
  except (TypeError, ValueError) as error:
    raise ValueError(f'tree: {error}') from error
  if trees.depth(tree) > gamma:
    raise ValueError(
      f'tree is {trees.depth(tree)} deep, and gamma is {gamma}: raise it, or '
      'give another tree'
    )
  return tree
