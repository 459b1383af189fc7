"""Times the parts of an iteration on this device."""

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
from specdec_jax.measure import loops as loops_lib
from specdec_jax.measure import stopwatch
from specdec_jax.measure.loops import CompiledLoop
from specdec_jax.models.products import MOST_BY_TILES
from specdec_jax.theory.costs import per_token, widths_to_time


@dataclasses.dataclass(frozen=True, kw_only=True)
class CostPrograms:
  """An iteration's parts, compiled, to be timed in turns.

  Attributes:
    loops: short decodes, by width and `drafted`, and their launches.
    widths: numbers of positions of target calls.
    proposals: of `stopwatch.propose_programs`, by gamma.
    extend: the widest target call alone, without sampling, verification and
      the loop.
    is_short: whether iterations may have no draft, so that the cost of the loop
      cannot be computed from the mean iteration.
  """

  loops: Mapping[Hashable, CompiledLoop]
  widths: Sequence[int]
  proposals: Mapping[int, Sequence[stopwatch.Repeated]]
  extend: stopwatch.Repeated
  is_short: bool

  @property
  def programs(self) -> dict[Hashable, Callable[[], Any]]:
    """Returns the programs for `stopwatch.alternate`, by name."""
    drafts: dict[Hashable, Callable[[], Any]] = {
      ('draft', gamma, i): program
      for gamma, programs in self.proposals.items()
      for i, program in enumerate(programs)
    }
    return {'extend': self.extend, **loops_lib.calls(self.loops), **drafts}

  def costs(
    self,
    seconds: Mapping[Hashable, np.ndarray],
    results: Mapping[Hashable, DecodeState],
  ) -> dict[str, Any]:
    """Computes costs from what `stopwatch.alternate` returned.

    Returns the fields of `theory.costs.Costs` except `c_hat`, in seconds;
    `extend_seconds` of a target call alone, while `target_seconds` include
    sampling, verification and the loop; `iteration_seconds` with a draft, None
    if iterations vary; and `turn_seconds`, lists by the name of a decode.
    """
    timed = loops_lib.timed(self.loops, seconds, results)

    def median(name: Hashable) -> float:
      return float(np.median(timed[name].seconds))

    def iteration(name: Hashable) -> float:
      state = timed[name].states[0]
      num_iterations = int(state.statistics.num_target_runs.max())
      decode, launch = median(name), median(('launch', name))
      # With very few turns, a delayed launch may seem longer than the decode.
      if launch < decode:
        return (decode - launch) / num_iterations
      return decode / num_iterations

    # Seconds of drafts by gamma, and of target calls by width.
    propose = {
      gamma: stopwatch.propose_seconds(
        programs, [seconds['draft', gamma, i] for i in range(len(programs))]
      )
      for gamma, programs in self.proposals.items()
    }
    target = [iteration(width) for width in self.widths]
    max_gamma = max(propose)
    first, last = propose[1], propose[max_gamma]
    # The loop itself: a drafted iteration less its draft and its target call;
    # on a noisy machine the difference may be negative.
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
        name: timed[loop].turns.tolist() for name, loop in turns.items()
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
  plain: CompiledLoop | None = None,
) -> CostPrograms:
  """Compiles an iteration's parts for one batch.

  All share the prefill and the buffer sizes of the longest draft.

  Args:
    params: weights.
    rng_key: as for `speculative.generate`, like `prompt` and `max_len`.
    prompt: the batch.
    method: all but the drafter.
    drafters: the same drafter by gamma, 1 and the largest among them.
    max_len: the size of buffers.
    widths: of target calls, from 1 to gamma + 1; None: `costs.widths_to_time`,
      and on a CPU the widths where another implementation of products begins.
    plain: plain decoding of the same batch, perhaps in a faster dtype; None:
      in the target's dtype.
  """
  max_gamma = max(drafters)
  if widths is None:
    width_set = {*widths_to_time(max_gamma)}
    if jax.default_backend() == 'cpu':
      step = MOST_BY_TILES // prompt.decoder_lengths.size
      width_set |= {step, step + 1} & {*range(1, max_gamma + 1)}
    widths = [*width_set]
  widths = sorted(widths)
  method = dataclasses.replace(method, drafter=drafters[max_gamma])
  args = params, rng_key, [prompt]
  plain = plain or loops_lib.plain_loop(*args, method=method, max_len=max_len)
  drafted = loops_lib.speculative_loop(*args, method=method, max_len=max_len)
  state = loops_lib.shorten(drafted.states[0])
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
    loops=_short_decodes(plain, drafted, widths),
    widths=widths,
    proposals=proposals,
    extend=extend,
    is_short=method.drafter.may_abstain,
  )


def _short_decodes(
  plain: CompiledLoop, drafted: CompiledLoop, widths: Sequence[int]
) -> dict[Hashable, CompiledLoop]:
  """Compiles decodes of a few tokens: plain as width 1, `drafted`, and target
  calls of each further width; and the launches of them all."""
  method = drafted.program.method
  vocab_size = method.target.vocab_size
  propose = functools.partial(
    speculative.propose, drafter=method.drafter, vocab_size=vocab_size
  )
  draft, _ = jax.eval_shape(propose, drafted.params, drafted.states[0])
  # Verification costs more if drafts have distributions.
  full = functools.partial(
    loops_lib.full_width_loop,
    drafted,
    vocab_size=None if draft.probs is None else vocab_size,
  )
  loops: dict[Hashable, CompiledLoop] = {1: plain, 'drafted': drafted}
  loops |= stopwatch.together(
    {width: functools.partial(full, width - 1) for width in widths[1:]}
  )
  loops = {name: loops_lib.shortened(loop) for name, loop in loops.items()}
  return loops | {
    ('launch', name): loops_lib.finished(loop) for name, loop in loops.items()
  }
