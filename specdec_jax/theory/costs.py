"""Costs: the times of an iteration's parts, measured or from compiled code."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from specdec_jax.theory.acceptance import in_range

# The `kind` of a file of costs, which `calibrate` writes and `plan` reads.
KIND = 'specdec costs'


def widths_to_time(max_gamma: int) -> tuple[int, ...]:
  """Chooses widths of target calls to time for `Costs` up to `max_gamma`: 1,
  the widest and one between, such as (1, 5, 9) for 8."""
  return tuple(sorted({1, 1 + -(-max_gamma // 2), max_gamma + 1}))


def per_token(first: float, total: float, num: int) -> float:
  """Computes the cost of each token after the first of a draft of `num` tokens.

  `first` is the cost of a draft of one token, `total` of all: 0 if the first
  costs as much as all, and `first` if there are no others.
  """
  if num <= 1:
    return first
  return max(total - first, 0.0) / (num - 1)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Costs:
  """Times of an iteration's parts, in seconds or any other unit.

  A tree is drafted level by level and scored in one call. Unless trees were
  compiled, its costs are lower bounds: a level is assumed to cost what a
  chain's token does, and scoring what a chain of as many tokens does.

  Attributes:
    widths: positions per target call, ascending from 1.
    target_seconds: time of a target call of each width; between them times are
      interpolated, beyond the last they are unknown.
    first_draft_seconds: time of an iteration's first drafted token, for which
      the drafter also reads what was committed.
    draft_seconds: time of each further drafted token.
    loop_seconds: time of an iteration beyond drafting and scoring.
    launch_seconds: time of a decode beyond its iterations.
    plain_launch_seconds: the same of plain decoding.
    c_hat: the drafter's operations per token over the target's.
    undrafted: share of iterations in which no row has a draft, so that scoring
      is that of a plain step.
    tree_nodes: sizes of the compiled trees, ascending. Between them times are
      interpolated; a smaller tree costs as much as the first.
    tree_seconds: time to score each tree, walk it and move its path in caches.
    level_seconds: mean time to draft a level of each tree.
  """

  widths: Sequence[int]
  target_seconds: Sequence[float]
  first_draft_seconds: float
  draft_seconds: float
  loop_seconds: float = 0.0
  launch_seconds: float = 0.0
  plain_launch_seconds: float = 0.0
  c_hat: float = 0.0
  undrafted: float = 0.0
  tree_nodes: Sequence[int] = ()
  tree_seconds: Sequence[float] = ()
  level_seconds: Sequence[float] = ()

  def __post_init__(self):
    widths = list(self.widths)
    if widths[:1] != [1] or widths != sorted(set(widths)):
      raise ValueError(f'widths must ascend from 1, got {widths}')
    if (np.diff(self.tree_nodes) <= 0).any():
      raise ValueError(f'tree_nodes must ascend, got {list(self.tree_nodes)}')
    for name, sizes in (
      ('target_seconds', widths),
      *(('tree_seconds', self.tree_nodes), ('level_seconds', self.tree_nodes)),
    ):
      if (num_times := len(getattr(self, name))) != len(sizes):
        raise ValueError(f'{name} needs {len(sizes)} times, got {num_times}')
    if not (least := np.min(self.target_seconds)) > 0:  # NaN included.
      raise ValueError(f'times of the target must be above 0, got {least}')
    for field in dataclasses.fields(self)[2:]:
      in_range(field.name, getattr(self, field.name), 0)

  @classmethod
  def among(cls, figures: Mapping[str, Any]) -> 'Costs':
    """Makes the costs from the figures of `specdec calibrate` or `plan`."""
    names = [field.name for field in dataclasses.fields(cls)]
    return cls(**{k: figures[k] for k in names if figures.get(k) is not None})

  @property
  def plain_seconds(self) -> float:
    """T(1), the time of a plain step."""
    return float(self.target_seconds[0])

  @property
  def max_gamma(self) -> int:
    """The largest gamma whose scoring time is known."""
    return int(self.widths[-1]) - 1

  def check_gamma(self, gamma: int) -> None:
    """Raises ValueError if scoring drafts of `gamma` was not measured."""
    in_range('gamma', gamma, 0)
    if gamma > self.max_gamma:
      raise ValueError(
        f'T({gamma + 1}) is not known: target calls were measured up to '
        f'T({self.max_gamma + 1}), gamma {self.max_gamma}'
      )

  def drafting_seconds(self, gamma: int, depth: int | None = None) -> float:
    """Computes the time to draft `gamma` tokens, with `depth` for a tree."""
    levels = gamma if depth is None else depth
    if levels == 0:
      return 0.0
    chain = self.first_draft_seconds + (levels - 1) * self.draft_seconds
    if depth is None or not self.tree_nodes:
      return chain
    # At least the time of a chain: the parts of a chain are compiled
    # separately, while a tree's program may keep weights on the chip between
    # levels.
    level = np.interp(gamma, self.tree_nodes, self.level_seconds)
    return max(chain, depth * float(level))

  def scoring_seconds(self, gamma: int, depth: int | None = None) -> float:
    """Computes the time to score that draft. Raises as `check_gamma`."""
    if depth is None or not self.tree_nodes:
      return self.verify_cost_ratio(gamma) * self.plain_seconds
    return float(np.interp(gamma, self.tree_nodes, self.tree_seconds))

  def c(self, gamma: int) -> float:
    """Computes the mean time per drafted token over that of a plain step."""
    in_range('gamma', gamma, 1)
    return self.drafting_seconds(gamma) / gamma / self.plain_seconds

  def verify_cost_ratio(self, gamma: int) -> float:
    """Computes T(gamma + 1) / T(1). Raises as `check_gamma`."""
    self.check_gamma(gamma)
    # With widths 1, 5 and 9, T(3) is the mean of T(1) and T(5).
    seconds = np.interp(gamma + 1, self.widths, self.target_seconds)
    return float(seconds) / self.plain_seconds

  def iteration_seconds(self, gamma: int, depth: int | None = None) -> float:
    """Computes an iteration's time; 0 is plain. Raises as `check_gamma`."""
    if gamma == 0:
      return self.plain_seconds
    scoring = self.scoring_seconds(gamma, depth)
    scoring += self.undrafted * (self.plain_seconds - scoring)
    return self.drafting_seconds(gamma, depth) + scoring + self.loop_seconds

  def decode_seconds(
    self, gamma: int, num_iterations: float, depth: int | None = None
  ) -> float:
    """Computes a decode's time after its prefill. Raises as `check_gamma`."""
    launch = self.launch_seconds if gamma else self.plain_launch_seconds
    return num_iterations * self.iteration_seconds(gamma, depth) + launch
