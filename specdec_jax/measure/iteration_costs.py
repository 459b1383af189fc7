"""What an iteration's parts cost on this device."""

import dataclasses
import functools
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from specdec_jax.base import Array, Drafter, Params, Prompt
from specdec_jax.decoding import speculative
from specdec_jax.decoding.method import Method
from specdec_jax.decoding.state import DecodeState
from specdec_jax.measure import sides as sides_lib
from specdec_jax.measure import stopwatch
from specdec_jax.measure.sides import Side
from specdec_jax.models.products import MOST_BY_TILES
from specdec_jax.theory.costs import per_token, widths_to_time


@dataclasses.dataclass(frozen=True, kw_only=True)
class CostPrograms:
  """An iteration's parts, compiled, to be timed in turns with each other or
  with anything else.

  Attributes:
    sides: short decodes by width, and of the drafter, each with its launch.
    widths: of target calls.
    proposals: of `stopwatch.propose_programs`, by gamma.
    extend: the widest target call by itself, without sampling, verification and
      the loop around it.
    is_short: whether iterations may score one position, so that the mean
      iteration says nothing of the loop.
  """

  sides: Mapping[Hashable, Side]
  widths: Sequence[int]
  proposals: Mapping[int, Sequence[stopwatch.Repeated]]
  extend: stopwatch.Repeated
  is_short: bool

  @property
  def programs(self) -> dict[Hashable, Callable[[], Any]]:
    """Lists what `stopwatch.alternate` is to time, by name."""
    drafts: dict[Hashable, Callable[[], Any]] = {
      ('draft', gamma, i): each
      for gamma, made in self.proposals.items()
      for i, each in enumerate(made)
    }
    return {'extend': self.extend, **sides_lib.calls(self.sides), **drafts}

  def costs(
    self,
    seconds: Mapping[Hashable, np.ndarray],
    results: Mapping[Hashable, DecodeState],
  ) -> dict[str, Any]:
    """Returns the fields of `theory.costs.Costs` but `c_hat`, in seconds, from
    what `stopwatch.alternate` returned.

    And `extend_seconds`, beside which `target_seconds` are with sampling,
    verification and the loop; `iteration_seconds` of one with a draft, None
    where that varies; and `turn_seconds`, lists of each decode by its name.
    """
    timed = sides_lib.timed(self.sides, seconds, results)

    def median(name: Hashable) -> float:
      return float(np.median(timed[name].seconds))

    def iteration(name: Hashable) -> float:
      state = timed[name].states[0]
      num_iterations = int(state.statistics.num_target_runs.max())
      decode, launch = median(name), median(('launch', name))
      # Of very few turns a launch may be the one that the machine held up.
      return (decode - launch if launch < decode else decode) / num_iterations

    propose = {
      gamma: stopwatch.propose_seconds(
        programs, [seconds['draft', gamma, i] for i in range(len(programs))]
      )
      for gamma, programs in self.proposals.items()
    }
    target = [iteration(width) for width in self.widths]
    max_gamma = max(propose)
    first, last = propose[1], propose[max_gamma]
    # What is left of a drafted iteration when its draft and its scoring are
    # taken away; a noisy machine may leave less than nothing.
    scoring = target[self.widths.index(max_gamma + 1)]
    drafted = iteration('drafted')
    beyond = drafted - last - scoring
    widest = self.widths[-1]
    turns = {'plain': 1, 'speculative': 'drafted', f'T({widest})': widest}
    extend = float(np.median(seconds['extend']))
    return {
      'widths': list(self.widths),
      'target_seconds': target,
      'first_draft_seconds': first,
      'draft_seconds': per_token(first, last, max_gamma),
      'loop_seconds': 0.0 if self.is_short else max(beyond, 0.0),
      'launch_seconds': median(('launch', 'drafted')),
      'plain_launch_seconds': median(('launch', 1)),
      'extend_seconds': extend / self.extend.num_calls,
      'iteration_seconds': None if self.is_short else drafted,
      'turn_seconds': {
        name: timed[side].turns.tolist() for name, side in turns.items()
      },
    }


def cost_programs(
  params: Params,
  rng_key: Array,
  prompt: Prompt,
  *,
  method: Method,
  drafters: Mapping[int, Drafter],
  max_len: int,
  widths: Sequence[int] | None = None,
  plain: Side | None = None,
) -> CostPrograms:
  """Compiles an iteration's parts for one batch. Prefill and buffers of all are
  those of the longest draft.

  Args:
    params: this, `rng_key`, `prompt`, `max_len` as for `speculative.generate`.
    method: all but the drafter.
    drafters: the same drafter by gamma, 1 and the largest among them.
    widths: of target calls, from 1 to gamma + 1; None: `costs.widths_to_time`,
      and on a CPU those about which the time steps.
    plain: plain decoding of the same batch, which may be faster in another
      dtype; None means the target's own.
  """
  max_gamma = max(drafters)
  if widths is None:
    chosen = {*widths_to_time(max_gamma)}
    if jax.default_backend() == 'cpu':
      step = MOST_BY_TILES // prompt.decoder_lengths.size
      chosen |= {step, step + 1} & {*range(1, max_gamma + 1)}
    widths = [*chosen]
  widths = sorted(widths)
  method = dataclasses.replace(method, drafter=drafters[max_gamma])
  args = params, rng_key, [prompt]
  plain = plain or sides_lib.plain_side(*args, method=method, max_len=max_len)
  drafted = sides_lib.speculative_side(*args, method=method, max_len=max_len)
  state = sides_lib.shorten(drafted.states[0])
  extend = stopwatch.repeated(
    params, state, target=method.target, width=widths[-1]
  )
  proposals = {
    gamma: stopwatch.propose_programs(
      params, state, drafter, method.target, {widths[-1]: extend}
    )
    for gamma, drafter in sorted(drafters.items())
  }
  return CostPrograms(
    sides=_short_decodes(plain, drafted, widths),
    widths=widths,
    proposals=proposals,
    extend=extend,
    is_short=method.drafter.may_abstain,
  )


def _short_decodes(
  plain: Side, drafted: Side, widths: Sequence[int]
) -> dict[Hashable, Side]:
  """Compiles decodes of a few tokens, plain ones as width 1, drafted ones, and
  those that score as many positions as each other width; each with its launch.
  """
  method = drafted.program.method
  vocab_size = method.target.vocab_size
  propose = functools.partial(
    speculative.propose, drafter=method.drafter, vocab_size=vocab_size
  )
  draft, _ = jax.eval_shape(propose, drafted.params, drafted.states[0])
  # Verification costs more where drafts have distributions.
  full = functools.partial(
    sides_lib.full_width_side,
    drafted,
    vocab_size=None if draft.probs is None else vocab_size,
  )
  sides: dict[Hashable, Side] = {1: plain, 'drafted': drafted}
  sides |= stopwatch.together(
    {width: functools.partial(full, width - 1) for width in widths[1:]}
  )
  sides = {name: sides_lib.shortened(side) for name, side in sides.items()}
  return sides | {
    ('launch', name): sides_lib.finished(side) for name, side in sides.items()
  }
