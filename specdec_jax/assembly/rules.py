"""Acceptance rules as choices: for flags, gin files, T5X and Python alike; a
new one is a frozen dataclass with the methods of `Rule`, and a row of `RULES`.
"""

import dataclasses
import functools
from typing import Protocol

import jax
import jax.numpy as jnp

from specdec_jax import verification
from specdec_jax.assembly.choices import ChoiceError, Sampling, option
from specdec_jax.base import Array, Draft, Tree, Verification, VerifyFn
from specdec_jax.launch.numbers import cost, fraction, positive_int

_LENIENCE = 'below 1, accepts more and is no longer lossless'


class Rule(Protocol):
  """What every rule has: the target's sampling as it sees it, or ChoiceError if
  the rule does not go with it, and the rule itself."""

  def seen(self, sampling: Sampling) -> Sampling: ...

  def verify_fn(self) -> VerifyFn: ...


@dataclasses.dataclass(frozen=True, kw_only=True)
class SpeculativeSampling:
  """`verification.speculative_sampling`, lossless with lenience 1."""

  lenience: float = option(1.0, _LENIENCE, type=fraction)

  def seen(self, sampling: Sampling) -> Sampling:
    if self.lenience < 1 and sampling.is_greedy:
      raise ChoiceError(
        f'{{lenience}} {self.lenience:g} changes nothing at {{temperature}} 0, '
        'where speculative sampling accepts the likeliest token alone: give '
        '{rule} greedy, which accepts tokens nearly as likely'
      )
    return sampling

  def verify_fn(self) -> VerifyFn:
    return functools.partial(
      verification.speculative_sampling, lenience=self.lenience
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Block:
  """`verification.block_verification`, lossless."""

  def seen(self, sampling: Sampling) -> Sampling:
    return sampling

  def verify_fn(self) -> VerifyFn:
    return verification.block_verification


@dataclasses.dataclass(frozen=True, kw_only=True)
class Greedy:
  """`verification.greedy`: the argmax, or with a lenience below 1 tokens nearly
  as likely, for which it reads the target's distributions at temperature 1."""

  lenience: float = option(1.0, _LENIENCE, type=fraction)

  def seen(self, sampling: Sampling) -> Sampling:
    _check_greedy('greedy', sampling)
    if self.lenience < 1:
      return dataclasses.replace(sampling, temperature=1.0)
    return sampling

  def verify_fn(self) -> VerifyFn:
    return functools.partial(verification.greedy, lenience=self.lenience)


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

  def seen(self, sampling: Sampling) -> Sampling:
    _check_greedy('top_beta', sampling)
    return dataclasses.replace(sampling, temperature=1.0)

  def verify_fn(self) -> VerifyFn:
    return functools.partial(
      verification.top_beta, beta=self.beta, tau=self.tau
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Custom:
  """A rule that is none of `RULES`, or one with arguments bound elsewhere. It
  sees the target at `temperature`, if not at that of the sampling."""

  function: VerifyFn
  temperature: float | None = None

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

  def verify_fn(self) -> VerifyFn:
    return self.function


def judges_trees(rule: Rule) -> bool:
  """Whether a rule has a form for trees; each of them is lossless."""
  return rule in (SpeculativeSampling(), Greedy())


def check_judges_trees(rule: Rule) -> None:
  """Raises ChoiceError for a rule that judges chains alone."""
  if not judges_trees(rule):
    names = {choice: name for name, choice in RULES.items()}
    raise ChoiceError(
      f'{{rule}} {names.get(type(rule), rule)}, with its options, judges '
      'chains: leave it out where drafts are trees'
    )


def for_drafts(rule: Rule, tree: Tree | None) -> VerifyFn:
  """The rule for chains, `tree` None, or the lossless one for trees of a shape:
  a walk along what the target says, and traversal verification where the
  drafter hands over what its tokens were drawn from. Raises as
  `check_judges_trees`."""
  if tree is None:
    return rule.verify_fn()
  check_judges_trees(rule)
  if rule == Greedy():
    return functools.partial(verification.greedy_walk, tree=tree)

  def verify(
    row_keys: Array, draft: Draft, target_probs: Array
  ) -> Verification:
    of_tree = verification.traversal
    if draft.probs is None:
      of_tree = verification.target_sample_walk
    return of_tree(row_keys, draft, target_probs, tree=tree)

  return verify


RULES: dict[str, type] = {
  'speculative_sampling': SpeculativeSampling,
  'greedy': Greedy,
  'block': Block,
  'top_beta': TopBeta,
}


def _check_greedy(name: str, sampling: Sampling) -> None:
  if not sampling.is_greedy:
    raise ChoiceError(
      f'{{rule}} {name} decodes the argmax: it needs {{temperature}} '
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
