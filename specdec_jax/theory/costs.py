"""Times of the parts of an iteration, measured or compiled."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from specdec_jax.theory.acceptance import in_range

# What files of costs say that they are: `calibrate` writes them, `plan` reads.
KIND = 'specdec costs'


def widths_to_time(max_gamma: int) -> tuple[int, ...]:
  """Positions of the target calls that suffice for `Costs` up to `max_gamma`:
  one, the widest, and one between."""
  return tuple(sorted({1, 1 + -(-max_gamma // 2), max_gamma + 1}))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Costs:
  """Times of the parts of an iteration, in seconds or any one unit.

  A tree is drafted level by level and scored in one call. What that takes is
  known where trees themselves were compiled. Elsewhere a level is taken to cost
  what a token of a chain does, and scoring what a chain of as many tokens does:
  the least that it can cost.

  Attributes:
    widths: positions of a target call, ascending, the first of them 1.
    target_seconds: of a target call of each width; those between are
      interpolated, and beyond the last nothing is known.
    first_draft_seconds: of the first drafted token of an iteration, for which
      the drafter also reads what was committed; `draft_seconds` of each other.
    loop_seconds: what an iteration costs beyond drafting and scoring.
    launch_seconds: what a decode costs beyond its iterations, and
      `plain_launch_seconds` plain decoding.
    c_hat: operations of the drafter per token over the target's.
    tree_nodes: sizes of the trees that were compiled, ascending. Those between
      are interpolated, and a smaller tree costs as much as the first.
    tree_seconds: of the iteration that scores each, walks it and moves its path
      in the caches, without the drafting.
    level_seconds: of drafting a level of each, on average.
  """

  widths: Sequence[int]
  target_seconds: Sequence[float]
  first_draft_seconds: float
  draft_seconds: float
  loop_seconds: float = 0.0
  launch_seconds: float = 0.0
  plain_launch_seconds: float = 0.0
  c_hat: float = 0.0
  tree_nodes: Sequence[int] = ()
  tree_seconds: Sequence[float] = ()
  level_seconds: Sequence[float] = ()

  def __post_init__(self):
    widths = list(self.widths)
    if widths[:1] != [1] or widths != sorted(set(widths)):
      raise ValueError(f'widths must ascend from 1, got {widths}')
    if not (least := np.min(self.target_seconds)) > 0:  # NaN included.
      raise ValueError(f'times of the target must be above 0, got {least}')
    if (np.diff(self.tree_nodes) <= 0).any():
      raise ValueError(f'tree_nodes must ascend, got {list(self.tree_nodes)}')
    for name, sizes in (
      ('target_seconds', widths),
      *(('tree_seconds', self.tree_nodes), ('level_seconds', self.tree_nodes)),
    ):
      if (num_times := len(getattr(self, name))) != len(sizes):
        raise ValueError(f'{name} needs {len(sizes)} times, got {num_times}')
    for field in dataclasses.fields(self)[2:]:
      in_range(field.name, getattr(self, field.name), 0)

  @classmethod
  def among(cls, figures: Mapping[str, Any]) -> 'Costs':
    """Picks them from what `specdec calibrate` or `plan` writes."""
    names = [field.name for field in dataclasses.fields(cls)]
    return cls(**{k: figures[k] for k in names if figures.get(k) is not None})

  @property
  def plain_seconds(self) -> float:
    """T(1), a plain step."""
    return float(self.target_seconds[0])

  @property
  def max_gamma(self) -> int:
    """The largest gamma whose scoring is known."""
    return int(self.widths[-1]) - 1

  def check_gamma(self, gamma: int) -> None:
    """Raises ValueError if scoring the drafts of `gamma` was not measured."""
    in_range('gamma', gamma, 0)
    if gamma > self.max_gamma:
      raise ValueError(
        f'T({gamma + 1}) is not known: target calls were measured up to '
        f'T({self.max_gamma + 1}), gamma {self.max_gamma}'
      )

  def drafting_seconds(self, gamma: int, depth: int | None = None) -> float:
    """Seconds to draft `gamma` tokens: a chain, or a tree of `depth` levels."""
    levels = gamma if depth is None else depth
    if levels == 0:
      return 0.0
    chain = self.first_draft_seconds + (levels - 1) * self.draft_seconds
    if depth is None or not self.tree_nodes:
      return chain
    # A chain's parts are compiled apart: weights that one program keeps on the
    # chip from level to level would be a gain of trees alone.
    level = np.interp(gamma, self.tree_nodes, self.level_seconds)
    return max(chain, depth * float(level))

  def scoring_seconds(self, gamma: int, depth: int | None = None) -> float:
    """Seconds to score what `drafting_seconds` drafts; as `check_gamma`."""
    if depth is None or not self.tree_nodes:
      return self.verify_cost_ratio(gamma) * self.plain_seconds
    return float(np.interp(gamma, self.tree_nodes, self.tree_seconds))

  def c(self, gamma: int) -> float:
    """Returns a mean drafted token over a plain step, for gamma at least 1."""
    in_range('gamma', gamma, 1)
    return self.drafting_seconds(gamma) / gamma / self.plain_seconds

  def verify_cost_ratio(self, gamma: int) -> float:
    """Returns T(gamma + 1) / T(1). Raises as `check_gamma`."""
    self.check_gamma(gamma)
    seconds = np.interp(gamma + 1, self.widths, self.target_seconds)
    return float(seconds) / self.plain_seconds

  def iteration_seconds(self, gamma: int, depth: int | None = None) -> float:
    """Seconds of one iteration, with `depth` of a tree; with gamma 0 of a plain
    step. Raises as `check_gamma`."""
    if gamma == 0:
      return self.plain_seconds
    scoring = self.scoring_seconds(gamma, depth)
    return self.drafting_seconds(gamma, depth) + scoring + self.loop_seconds

  def decode_seconds(self, gamma: int, num_iterations: float) -> float:
    """Seconds of a whole decode after its prefill; as `iteration_seconds`."""
    launch = self.launch_seconds if gamma else self.plain_launch_seconds
    return num_iterations * self.iteration_seconds(gamma) + launch
