"""Acceptance rules as choices: for flags, gin files, T5X and Python alike; a
new one is a frozen dataclass with the members of `Rule`, and a row of `RULES`.
"""

import dataclasses
import functools
from typing import Protocol

import jax
import jax.numpy as jnp

from specdec_jax import verification
from specdec_jax.assembly.option_fields import option
from specdec_jax.assembly.sampling import Sampling
from specdec_jax.base import Array, Draft, Tree, Verification, VerifyFn
from specdec_jax.launch.numbers import cost, fraction, positive_int

_LENIENCE = 'below 1, accepts more and is no longer lossless'


class Rule(Protocol):
  """What every rule has.

  Attributes:
    is_lossless: whether the target's distribution is kept with its options.
    seen: the target's sampling as the rule sees it; ValueError if the rule does
      not go with it.
    verify_fn: the function that judges drafts which are trees of a shape, or
      chains, `tree` None; None if the rule does not judge such drafts.
  """

  @property
  def is_lossless(self) -> bool: ...

  def seen(self, sampling: Sampling) -> Sampling: ...

  def verify_fn(self, tree: Tree | None) -> VerifyFn | None: ...


@dataclasses.dataclass(frozen=True, kw_only=True)
class SpeculativeSampling:
  """`verification.speculative_sampling`, lossless with lenience 1. For trees it
  is `verification.traversal` where the drafter hands over what its tokens were
  drawn from, and otherwise `verification.target_sample_walk`."""

  lenience: float = option(1.0, _LENIENCE, type=fraction)

  @property
  def is_lossless(self) -> bool:
    return self.lenience == 1

  def seen(self, sampling: Sampling) -> Sampling:
    if self.lenience < 1 and sampling.is_greedy:
      raise ValueError(
        f'lenience {self.lenience:g} changes nothing at temperature 0, '
        'where speculative sampling accepts the likeliest token alone: give '
        'verification greedy, which accepts tokens nearly as likely'
      )
    return sampling

  def verify_fn(self, tree: Tree | None) -> VerifyFn | None:
    if tree is None:
      return functools.partial(
        verification.speculative_sampling, lenience=self.lenience
      )
    if not self.is_lossless:
      return None

    def verify(
      row_keys: Array, draft: Draft, target_probs: Array
    ) -> Verification:
      of_tree = verification.traversal
      if draft.probs is None:
        of_tree = verification.target_sample_walk
      return of_tree(row_keys, draft, target_probs, tree=tree)

    return verify


@dataclasses.dataclass(frozen=True, kw_only=True)
class Greedy:
  """`verification.greedy`: the argmax, or with a lenience below 1 tokens nearly
  as likely, for which it reads the target's distributions at temperature 1. For
  trees it is `verification.greedy_walk`."""

  lenience: float = option(1.0, _LENIENCE, type=fraction)

  @property
  def is_lossless(self) -> bool:
    return self.lenience == 1

  def seen(self, sampling: Sampling) -> Sampling:
    _check_greedy('greedy', sampling)
    if self.lenience < 1:
      return dataclasses.replace(sampling, temperature=1.0)
    return sampling

  def verify_fn(self, tree: Tree | None) -> VerifyFn | None:
    if tree is None:
      return functools.partial(verification.greedy, lenience=self.lenience)
    if not self.is_lossless:
      return None
    return functools.partial(verification.greedy_walk, tree=tree)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Block:
  """`verification.block_verification`."""

  is_lossless = True

  def seen(self, sampling: Sampling) -> Sampling:
    return sampling

  def verify_fn(self, tree: Tree | None) -> VerifyFn | None:
    return verification.block_verification if tree is None else None


@dataclasses.dataclass(frozen=True, kw_only=True)
class TopBeta:
  """`verification.top_beta`, which reads the target's distributions at
  temperature 1 and decodes greedily."""

  beta: int = option(
    3, 'accept drafted tokens among so many likeliest', type=positive_int
  )
  tau: float = option(
    1.0,
    "and at most so far below the likeliest's log-probability, in nats",
    type=cost,
  )

  is_lossless = False

  def seen(self, sampling: Sampling) -> Sampling:
    _check_greedy('top_beta', sampling)
    return dataclasses.replace(sampling, temperature=1.0)

  def verify_fn(self, tree: Tree | None) -> VerifyFn | None:
    if tree is not None:
      return None
    return functools.partial(
      verification.top_beta, beta=self.beta, tau=self.tau
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Traversal:
  """`verification.traversal`, for trees alone."""

  is_lossless = True

  def seen(self, sampling: Sampling) -> Sampling:
    return sampling

  def verify_fn(self, tree: Tree | None) -> VerifyFn | None:
    if tree is None:
      return None
    return functools.partial(verification.traversal, tree=tree)


@dataclasses.dataclass(frozen=True, kw_only=True)
class TargetSampleWalk:
  """`verification.target_sample_walk`, for trees alone."""

  is_lossless = True

  def seen(self, sampling: Sampling) -> Sampling:
    return sampling

  def verify_fn(self, tree: Tree | None) -> VerifyFn | None:
    if tree is None:
      return None
    return functools.partial(verification.target_sample_walk, tree=tree)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Custom:
  """A rule that is none of `RULES`, or one with arguments bound elsewhere; for
  chains. It sees the target at `temperature`, if not at that of the sampling.
  """

  function: VerifyFn
  temperature: float | None = None

  # Nobody knows.
  is_lossless = False

  def seen(self, sampling: Sampling) -> Sampling:
    name = getattr(self.function, '__name__', 'the rule')
    if name == 'greedy':
      _check_greedy(name, sampling)
    if self.temperature is not None:
      sampling = dataclasses.replace(sampling, temperature=self.temperature)
    if sampling.is_greedy and _relaxes(self.function):
      raise ValueError(
        f'the lenience or beta of {name} changes nothing at temperature 0, '
        'where only the likeliest token is possible: take the rule greedy or '
        'top_beta, which read the target at temperature 1, as '
        'verification/lenient_greedy.gin and verification/top_beta.gin do'
      )
    return sampling

  def verify_fn(self, tree: Tree | None) -> VerifyFn | None:
    return self.function if tree is None else None


RULES: dict[str, type[Rule]] = {
  'speculative_sampling': SpeculativeSampling,
  'greedy': Greedy,
  'block': Block,
  'top_beta': TopBeta,
  'traversal': Traversal,
  'target_sample_walk': TargetSampleWalk,
}


def fitting(rule: Rule, tree: Tree | None) -> VerifyFn:
  """Returns `rule.verify_fn`; ValueError if it does not judge such drafts."""
  found = rule.verify_fn(tree)
  if found is None:
    names = {choice: name for name, choice in RULES.items()}
    shapes = ('trees', 'chains') if tree is None else ('chains', 'trees')
    raise ValueError(
      f'verification {names.get(type(rule), rule)}, with its options, judges '
      f'{shapes[0]}, and the drafts are {shapes[1]}: leave it out'
    )
  return found


def _check_greedy(name: str, sampling: Sampling) -> None:
  if not sampling.is_greedy:
    raise ValueError(
      f'verification {name} decodes the argmax: it needs temperature '
      f'0, got {sampling.temperature}'
    )


def _relaxes(function: VerifyFn) -> bool:
  """Whether a rule accepts a token with just under half of the mass with a
  greater chance than that, but never one without any: it is asked, since only
  gin knows with which arguments it will be called."""
  below_half = 0.5 - 2.0**-20
  probs = jnp.array([[1 - below_half, below_half], [1.0, 0.0]], jnp.float32)
  draft = Draft(
    tokens=jnp.ones((2, 1), jnp.int32),
    probs=None,
    lengths=jnp.ones(2, jnp.int32),
  )
  row_keys = jax.random.split(jax.random.key(0), 2)
  both = jnp.stack([probs, probs], axis=1)
  # A function of its own: gin's is the same whatever is bound, and `jit` would
  # not trace it again.
  ask = jax.jit(lambda *args: function(*args).accept_probs)
  soft, hard = ask(row_keys, draft, both)
  return bool(soft[0] > below_half) and not bool(hard[0])
