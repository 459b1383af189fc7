"""Acceptance rules as choices: for flags, gin files, T5X and Python alike; a
new one is a frozen dataclass that makes a `Judge`, and a row of `RULES`.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

from specdec_jax import verification
from specdec_jax.assembly.option_fields import option
from specdec_jax.assembly.text_settings import TextSettings
from specdec_jax.base import Array, Draft, Tree, Verification, VerifyFn
from specdec_jax.launch.numbers import fraction
from specdec_jax.lazy import LazyTable

_LENIENCE = 'below 1, accepts more and is no longer lossless'


class Judge(NamedTuple):
  """A rule for a target that is sampled in one way.

  Attributes:
    name: of the rule, for users.
    sampling: the target's, as the rule sees it.
    for_chain: judges drafts that are chains; None if the rule judges trees.
    for_tree: judges trees, with the shape as `tree`; None if it judges chains.
    is_lossless: whether the target's distribution is kept.
  """

  name: str
  sampling: TextSettings
  for_chain: VerifyFn | None = None
  for_tree: Callable[..., Verification] | None = None
  is_lossless: bool = True

  def verify_fn(self, tree: Tree | None) -> VerifyFn:
    """Returns what judges chains, or trees of a shape; ValueError if none."""
    if tree is None and self.for_chain is not None:
      return self.for_chain
    if tree is not None and self.for_tree is not None:
      return functools.partial(self.for_tree, tree=tree)
    judged, drafts = ('trees', 'chains')[:: -1 if tree else 1]
    raise ValueError(
      f'verification {self.name} judges {judged}, not {drafts}: leave it out'
    )


class Rule(Protocol):
  """A rule as users choose it; `judge` raises ValueError if the rule does not
  support the sampling."""

  def judge(self, sampling: TextSettings) -> Judge: ...


@dataclasses.dataclass(frozen=True, kw_only=True)
class SpeculativeSampling:
  """`verification.speculative_sampling`, lossless with lenience 1. For trees it
  is `verification.traversal` where the drafter hands over what its tokens were
  drawn from, and otherwise `verification.target_sample_walk`."""

  lenience: float = option(1.0, _LENIENCE, type=fraction)

  def judge(self, sampling: TextSettings) -> Judge:
    is_lossless = self.lenience == 1
    if sampling.is_greedy and not is_lossless:
      raise ValueError(
        f'lenience {self.lenience:g} changes nothing at temperature 0: give '
        'verification greedy, which accepts tokens nearly as likely'
      )
    return Judge(
      'speculative_sampling',
      sampling,
      for_chain=functools.partial(
        verification.speculative_sampling, lenience=self.lenience
      ),
      # No rule for trees takes a lenience.
      for_tree=_traversal_or_walk if is_lossless else None,
      is_lossless=is_lossless,
    )


def _traversal_or_walk(
  row_keys: Array, draft: Draft, target_probs: Array, *, tree: Tree
) -> Verification:
  # Whether a draft has probabilities is known when the loop is traced, not
  # before.
  rule = verification.traversal
  if draft.probs is None:
    rule = verification.target_sample_walk
  return rule(row_keys, draft, target_probs, tree=tree)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Greedy:
  """`verification.greedy`: the argmax, or with a lenience below 1 tokens nearly
  as likely, for which it reads the target's distributions at temperature 1. For
  trees it is `verification.greedy_walk`."""

  lenience: float = option(1.0, _LENIENCE, type=fraction)

  def judge(self, sampling: TextSettings) -> Judge:
    check_greedy('greedy', sampling)
    is_lossless = self.lenience == 1
    return Judge(
      'greedy',
      sampling if is_lossless else at_temperature_one(sampling),
      for_chain=functools.partial(verification.greedy, lenience=self.lenience),
      for_tree=verification.greedy_walk if is_lossless else None,
      is_lossless=is_lossless,
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Block:
  """`verification.block_verification`."""

  def judge(self, sampling: TextSettings) -> Judge:
    return Judge('block', sampling, verification.block_verification)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Traversal:
  """`verification.traversal`, for trees alone."""

  def judge(self, sampling: TextSettings) -> Judge:
    return Judge('traversal', sampling, for_tree=verification.traversal)


@dataclasses.dataclass(frozen=True, kw_only=True)
class TargetSampleWalk:
  """`verification.target_sample_walk`, for trees alone."""

  def judge(self, sampling: TextSettings) -> Judge:
    rule = verification.target_sample_walk
    return Judge('target_sample_walk', sampling, for_tree=rule)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Custom:
  """A rule that is none of `RULES`, or one with arguments bound elsewhere; for
  chains. It sees the target at `temperature`, if not at that of the sampling.
  """

  function: VerifyFn
  temperature: float | None = None

  def judge(self, sampling: TextSettings) -> Judge:
    name = getattr(self.function, '__name__', 'the rule')
    # A reference of gin is another function with the same name.
    if name == 'greedy':
      check_greedy(name, sampling)
    if self.temperature is not None:
      sampling = dataclasses.replace(sampling, temperature=self.temperature)
    # Only its author knows whether it is lossless.
    return Judge(name, sampling, self.function, is_lossless=False)


_HERE = 'specdec_jax.assembly.rules'

RULES: LazyTable[type[Rule]] = LazyTable(
  {
    'speculative_sampling': f'{_HERE}:SpeculativeSampling',
    'greedy': f'{_HERE}:Greedy',
    'block': f'{_HERE}:Block',
    'top_beta': 'specdec_jax.contrib.top_beta.choice:TopBeta',
    'traversal': f'{_HERE}:Traversal',
    'target_sample_walk': f'{_HERE}:TargetSampleWalk',
  }
)


def __getattr__(name: str) -> Any:
  """Finds a rule by the name of its class, as gin files write it."""
  # This module is still being imported when it is looked up in itself.
  for key in RULES:
    path = RULES.path(key)
    if path.endswith(f':{name}') and not path.startswith(_HERE):
      return RULES[key]
  raise AttributeError(f'module {__name__!r} has no attribute {name!r}')


def at_temperature_one(sampling: TextSettings) -> TextSettings:
  """Returns the sampling at temperature 1, for rules that compare
  probabilities although decoding is greedy."""
  return dataclasses.replace(sampling, temperature=1.0)


def check_greedy(name: str, sampling: TextSettings) -> None:
  """Raises ValueError unless the target is decoded greedily."""
  if not sampling.is_greedy:
    raise ValueError(
      f'verification {name} needs temperature 0, got {sampling.temperature}'
    )
