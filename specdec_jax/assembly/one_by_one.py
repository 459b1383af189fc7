"""How choices with a model draft: a number of tokens one after the other, as
many as seem right, or a tree."""

from collections.abc import Sequence
from typing import Any

from specdec_jax import drafters, logits, trees
from specdec_jax.assembly.sampling import Sampling
from specdec_jax.base import Drafter, LanguageModel, Tree
from specdec_jax.drafters.autoregressive import Chain
from specdec_jax.drafters.stateless import MAX_GAMMA, check_gamma
from specdec_jax.launch.numbers import literal
from specdec_jax.theory import trees as theory

TREE = (
  'draft a tree of candidates rather than a chain, which pays on accelerators '
  'with few rows and loses on CPUs: a number of nodes, in the best shape that '
  'is at most gamma deep, or the parents of nodes 1, 2, ..., such as 0,0,1'
)
_EXPECTED = (
  'a number of nodes, the parents of nodes 1, 2, ..., such as 0,0,1, or their '
  'paths, such as [(0,), (1,), (0, 0)]'
)
tree_type = literal(_EXPECTED)


def tree_of(shape: Any, *, gamma: int) -> Tree:
  """The tree that a choice means, at most `gamma` deep.

  Args:
    shape: a number of nodes, in the best shape where only a typical alpha is
      known; the parents of nodes 1, 2, ...; or the nodes by the ranks along
      their paths, as in Medusa's and vLLM's settings.

  Raises:
    ValueError: if it is none of these, or deeper.
  """
  is_number = lambda value: type(value) is int and value >= 0
  try:
    if is_number(shape):
      if not 1 <= shape <= MAX_GAMMA:
        raise ValueError(f'a tree has 1 to {MAX_GAMMA} nodes, got {shape}')
      rates = theory.assumed_rates(theory.DEFAULT_ALPHA)
      return Tree(theory.best_tree(rates, shape, gamma))
    if isinstance(shape, str) or not isinstance(shape, Sequence):
      raise ValueError(f'{shape!r} is not {_EXPECTED}')
    if all(map(is_number, shape)):
      tree = Tree(tuple(shape))
    else:
      tree = Tree(theory.parents_of([tuple(path) for path in shape]))
    trees.check(tree)
  except (TypeError, ValueError) as error:
    raise ValueError(f'tree: {error}') from error
  depth = trees.depth(tree)
  if depth > gamma:
    raise ValueError(
      f'tree is {depth} deep, and gamma, the most that is accepted at '
      f'once, is {gamma}: raise it, or give another tree'
    )
  return tree


def check(choice: Any) -> None:
  """Raises ValueError for two ways of choosing what is drafted."""
  is_auto = choice.gamma == 'auto'
  if choice.schedule or choice.min_prob:
    if is_auto:
      raise ValueError(
        'gamma auto chooses one gamma for a run, and adaptive one for each '
        'draft: give one of them'
      )
    if choice.tree is not None:
      raise ValueError(
        'tree has one shape for all drafts, and adaptive a gamma for each: '
        'give one of them'
      )
  if choice.tree is None:
    return
  if is_auto:
    raise ValueError(
      'gamma auto measures chains, and tree is none: give one of them'
    )
  if getattr(choice, 'lookup', False):
    raise ValueError('lookup copies chains, and tree is none: give one of them')
  check_gamma(choice.gamma)
  tree_of(choice.tree, gamma=choice.gamma)


def has_tree(choice: Any) -> bool:
  """Whether drafts are trees, of a model or of copies."""
  if getattr(choice, 'tree', None) is not None:
    return True
  return getattr(choice, 'num_continuations', 1) > 1


def depth(choice: Any) -> int:
  """The most tokens of a draft that can be accepted."""
  gamma: int = choice.gamma
  if choice.tree is None:
    return gamma
  return trees.depth(tree_of(choice.tree, gamma=gamma))


def drafter(
  choice: Any,
  model: LanguageModel | Chain,
  sampling: Sampling,
  vocab_size: int,
  first: Drafter | None = None,
) -> Drafter:
  """The drafter of a model that drafts token after token.

  Args:
    choice: with `gamma`, `tree`, `schedule` and `min_prob`.
    model: as for `drafters.autoregressive`.
    sampling: the target's.
    vocab_size: ids with a token.
    first: a drafter that is asked before the model, with a gamma that varies.
  """
  to_probs = sampling.to_probs(vocab_size)
  if choice.tree is not None:
    if sampling.is_greedy:
      # Ranks need more than which token is the likeliest.
      to_probs = Sampling(temperature=1.0).to_probs(vocab_size)
    return drafters.branching(
      model,
      tree=tree_of(choice.tree, gamma=choice.gamma),
      logits_to_probs=to_probs,
      is_ranked=sampling.is_greedy,
    )
  if sampling.is_greedy:
    # What is likeliest is asked of the logits: one-hot probabilities would be
    # made of their argmax, to be searched for it again.
    to_probs = logits.mask_padding(vocab_size)
  settings: dict[str, Any] = {
    'gamma': choice.gamma,
    'logits_to_probs': to_probs,
    'is_argmax': sampling.is_greedy,
  }
  if not (first or choice.schedule or choice.min_prob):
    return drafters.autoregressive(model, **settings)
  return drafters.adaptive(
    model,
    schedule=choice.schedule,
    min_prob=choice.min_prob,
    first=first,
    **settings,
  )
