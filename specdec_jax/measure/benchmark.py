"""Plain against speculative decoding: times, rates, prediction and sameness.

All loops decode the same prompts in one process, alternating and warm. Times
are of decoding after the prefill; counters are of the timed decodes.
"""

import dataclasses
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import numpy as np

from specdec_jax.base import Drafter
from specdec_jax.measure import loops as loops_lib
from specdec_jax.measure import stopwatch
from specdec_jax.measure.comparison import Row, Timing
from specdec_jax.measure.loops import CompiledLoop, Timed
from specdec_jax.measure.sameness import sameness


@dataclasses.dataclass(frozen=True, kw_only=True)
class Drafted:
  """Speculative decoding, compiled, and programs that time its parts.

  Attributes:
    loop: the decoding itself.
    full_width: of `loops.full_width_loop`.
    propose: of `stopwatch.propose_programs`; empty if nothing is drafted.
    ends_early: whether drafts end early. The theorem then does not apply, and
      the number of draft steps of several rows is unknown, since each iteration
      takes as many as its longest draft.
  """

  loop: CompiledLoop
  full_width: CompiledLoop
  propose: Sequence[stopwatch.Repeated]
  ends_early: bool = False

  @property
  def drafter(self) -> Drafter:
    return self.loop.program.method.drafter

  @property
  def loops(self) -> list[CompiledLoop]:
    """The loops of which `timing` takes the times."""
    launch = loops_lib.finished(self.full_width)
    loops = [self.loop, self.full_width, launch]
    if self.drafter.may_abstain:
      loops.append(loops_lib.without_drafts(self.full_width))
    return loops

  def timing(self, timed: Sequence[Timed], per_proposal: float) -> Timing:
    """Returns the times of the parts from those of `loops`, in their order, and
    of a draft."""
    drafted, full_width, launch, *without_draft = timed
    per_short_iteration = None
    if without_draft:
      per_short_iteration = iteration_seconds(without_draft[0], launch, drafted)
    return Timing(
      prefill=self.loop.prefill_seconds,
      loop=drafted,
      per_iteration=iteration_seconds(full_width, launch, drafted),
      per_proposal=per_proposal,
      per_short_iteration=per_short_iteration,
    )


def drafted(
  loop: CompiledLoop, *, fixed: Drafter | None = None, ends_early: bool = False
) -> Drafted:
  """Compiles programs that time the parts of a `loops.speculative_loop`.

  `fixed`, for a drafter whose drafts end early, is the same drafter without
  that.
  """
  method, state = loop.program.method, loop.states[0]
  propose: tuple[stopwatch.Repeated, ...] = ()
  if fixed is not None:
    state = dataclasses.replace(state, drafter_state=state.drafter_state.cache)
  if method.drafter.gamma:
    propose = stopwatch.propose_programs(
      loop.params, state, fixed or method.drafter, method.target
    )
  return Drafted(
    loop=loop,
    full_width=loops_lib.full_width_loop(loop),
    propose=propose,
    ends_early=ends_early,
  )


def compare(
  plain: CompiledLoop,
  others: Sequence[Drafted],
  *,
  repeats: int,
  baseline: CompiledLoop | None = None,
  expected: CompiledLoop | None = None,
  title: str = '',
) -> list[Row]:
  """Times loops in turns, and predicts each speedup from the costs of parts.

  Args:
    plain: plain decoding in the same dtype: T(1), the unit of costs, and the
      tokens to compare with.
    others: speculative decoding with several drafters, or of several lengths.
    repeats: timed runs of each.
    baseline: the fastest plain decoding, which speedups are relative to; None:
      `plain`.
    expected: plain decoding at another width, to compare tokens with in place
      of `plain`.
    title: of a progress bar.

  Returns a row for each of `others`. ValueError if a model returned logits that
  are NaN.
  """
  # Time everything in turns; `plain` only once if it is the baseline.
  plain_loops = [plain]
  if baseline is not None and baseline is not plain:
    plain_loops = [baseline, plain]
  groups = [plain_loops, *(configuration.loops for configuration in others)]
  proposals = [configuration.propose for configuration in others]
  timed, per_proposal = _time(groups, proposals, repeats, title)
  plain_timings = [
    Timing(
      prefill=loop.prefill_seconds,
      loop=loop_timed,
      per_iteration=loop_timed.per_iteration,
    )
    for loop, loop_timed in zip(plain_loops, timed[0], strict=True)
  ]
  # Tokens are compared with those of plain decoding.
  reference, states = plain, plain_timings[-1].loop.states
  if expected is not None:
    reference, states = expected, expected.decode()
  return [
    Row(
      drafter=configuration.drafter,
      ends_early=configuration.ends_early,
      drafted=configuration.timing(group, seconds),
      plain=plain_timings[-1],
      baseline=plain_timings[0],
      sameness=sameness(
        # A drafter on the target's features brings a target of its own.
        reference.program.method.target,
        reference.params,
        states,
        group[0].states,
      ),
    )
    for configuration, group, seconds in zip(
      others, timed[1:], per_proposal, strict=True
    )
  ]


def _time(
  groups: Sequence[Sequence[CompiledLoop]],
  proposals: Sequence[Sequence[stopwatch.Repeated]],
  repeats: int,
  title: str,
) -> tuple[list[list[Timed]], list[float]]:
  """Returns times and results of loops, by group, and the seconds of a draft
  for each of `proposals`."""
  loops = {
    (number, i): loop
    for number, group in enumerate(groups)
    for i, loop in enumerate(group)
  }
  calls: dict[Hashable, Callable[[], Any]] = {**loops_lib.calls(loops)}
  for number, programs in enumerate(proposals):
    for i, program in enumerate(programs):
      calls['draft', number, i] = program
  seconds, results = stopwatch.alternate(calls, repeats, title=title)
  # Loops.
  timed = loops_lib.timed(loops, seconds, results)
  for result in timed.values():
    if any(np.any(state.has_nan) for state in result.states):
      raise ValueError('the logits were not numbers (NaN): nothing to time')
  by_group = [
    [timed[number, i] for i in range(len(group))]
    for number, group in enumerate(groups)
  ]
  # Drafts.
  per_proposal = []
  for number, programs in enumerate(proposals):
    runs = [seconds['draft', number, i] for i in range(len(programs))]
    per_proposal.append(stopwatch.propose_seconds(programs, runs))
  return by_group, per_proposal


def iteration_seconds(short: Timed, launch: Timed, drafted: Timed) -> float:
  """Returns the seconds of an iteration of `short`, a decode of a few tokens,
  with the launch spread over as many iterations as in the drafted decode."""
  # 4 iterations in 10 s, 6 of them for the launch: 1 s per iteration. If the
  # drafted decode has a launch per 60 iterations, 6/60 s more: 1.1 s.
  launch_seconds = min(launch.total, short.total)
  launches_per_iteration = len(drafted.states) / drafted.counts.iterations
  iteration = (short.total - launch_seconds) / short.counts.iterations
  return iteration + launch_seconds * launches_per_iteration
