"""What an iteration's parts cost on this device."""

import dataclasses
import functools
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from specdec_jax.base import Array, Drafter, Params, Prompt
from specdec_jax.decoding import speculative
from specdec_jax.decoding.method import Method
from specdec_jax.measure import sides as sides_lib
from specdec_jax.measure import stopwatch
from specdec_jax.measure.sides import Side
from specdec_jax.theory.costs import widths_to_time


class CostPrograms(NamedTuple):
  """What is timed, in turns with each other or with anything else, and a
  function from the seconds and results of `stopwatch.alternate` to figures."""

  programs: Mapping[Hashable, Callable[[], Any]]
  costs: Callable[[Mapping[Any, Any], Mapping[Any, Any]], dict[str, Any]]


def costs(*args: Any, repeats: int, **options: Any) -> dict[str, Any]:
  """The figures of `cost_programs`, whose other arguments these are, by
  `repeats` runs in turns."""
  made = cost_programs(*args, **options)
  return made.costs(*stopwatch.alternate(made.programs, repeats))


def cost_programs(
  params: Params,
  rng_key: Array,
  prompt: Prompt,
  *,
  method: Method,
  drafters: Mapping[int, Drafter],
  max_len: int,
  widths: Sequence[int] | None = None,
  num_decodes: int = 1,
  plain: Side | None = None,
) -> CostPrograms:
  """Compiles an iteration's parts for one batch. Prefill and buffers of all are
  those of the longest draft.

  Args:
    params: this, `rng_key`, `prompt` and `max_len` as for
      `speculative.generate`.
    method: all but the drafter.
    drafters: the same drafter by gamma, 1 and the largest among them.
    widths: of target calls to time, 1 and gamma + 1 among them; None means
      `costs.widths_to_time`.
    num_decodes: short decodes of each part in a turn, timed one by one; their
      median ignores the first, which finds cold caches.
    plain: plain decoding of the same batch, which may be faster in another
      dtype; None means the target's own.

  Returns:
    Programs, and a function to the fields of `theory.costs.Costs` but
    `c_hat`, in seconds, and `extend_seconds` of the widest target call by
    itself: its `target_seconds` are with sampling, verification and the loop.
  """
  max_gamma = max(drafters)
  widths = sorted(widths or widths_to_time(max_gamma))
  target = method.target
  method = dataclasses.replace(method, drafter=drafters[max_gamma])
  args: Any = (params, rng_key, [prompt])
  shared: dict[str, Any] = {'method': method, 'max_len': max_len}
  plain = plain or sides_lib.plain_side(*args, **shared)
  drafted = sides_lib.shortened(sides_lib.speculative_side(*args, **shared))
  state = drafted.states[0]
  propose = functools.partial(speculative.propose, drafter=drafters[max_gamma])
  has_probs = jax.eval_shape(propose, params, state)[0].probs is not None
  full = functools.partial(
    sides_lib.full_width_side,
    *args,
    vocab_size=target.vocab_size if has_probs else None,
    may_abstain=drafters[max_gamma].may_abstain,
    **shared,
  )
  widest = full(gamma=max(widths) - 1)
  named = {1: sides_lib.shortened(plain), 'drafted': drafted}
  named |= stopwatch.together(
    {
      width: functools.partial(full, gamma=width - 1, like=widest)
      for width in widths[1:-1]
    }
  )
  named[widths[-1]] = widest

  extend = stopwatch.repeated(params, state, target=target, width=widths[-1])
  proposals = {
    gamma: stopwatch.propose_programs(
      params, state, drafter, target, {widths[-1]: extend}
    )
    for gamma, drafter in sorted(drafters.items())
  }
  programs: dict[Hashable, Callable[[], Any]] = {'extend': extend}
  for name, side in named.items():
    for i in range(num_decodes):
      programs[name, i] = side.decode
      programs['launch', name, i] = sides_lib.finished(side).decode
  for gamma, made in proposals.items():
    programs |= {('draft', gamma, i): each for i, each in enumerate(made)}
  figures = functools.partial(
    _cost_figures,
    widths=widths,
    proposals=proposals,
    num_decodes=num_decodes,
    num_extends=extend.num_calls,
    is_short=drafters[max_gamma].may_abstain,
  )
  return CostPrograms(programs, figures)


def _cost_figures(
  seconds: Mapping[Any, Any],
  results: Mapping[Any, Any],
  *,
  widths: Sequence[int],
  proposals: Mapping[int, Sequence[stopwatch.Repeated]],
  num_decodes: int,
  num_extends: int,
  is_short: bool,
) -> dict[str, Any]:
  """The figures of `cost_programs`; `is_short` if iterations may score one
  position, so that the mean iteration says nothing of the loop."""

  def median(*name: Hashable) -> float:
    return float(np.median([seconds[*name, i] for i in range(num_decodes)]))

  def iteration(name: Hashable) -> float:
    [state] = results[name, 0]
    num_iterations = int(state.statistics.num_target_runs.max())
    decode, launch = median(name), median('launch', name)
    # Of very few turns a launch may be the one that the machine held up.
    return (decode - launch if launch < decode else decode) / num_iterations

  propose = {
    gamma: stopwatch.propose_seconds(
      programs, [seconds['draft', gamma, i] for i in range(len(programs))]
    )
    for gamma, programs in proposals.items()
  }
  target = [iteration(width) for width in widths]
  max_gamma = max(propose)
  first, last = propose[1], propose[max_gamma]
  further = max(last - first, 0.0) / (max_gamma - 1) if max_gamma > 1 else first
  beyond = iteration('drafted') - last - target[widths.index(max_gamma + 1)]
  return {
    'widths': list(widths),
    'target_seconds': target,
    'first_draft_seconds': first,
    'draft_seconds': further,
    'loop_seconds': 0.0 if is_short else max(beyond, 0.0),
    'launch_seconds': median('launch', 'drafted'),
    'plain_launch_seconds': median('launch', 1),
    'extend_seconds': float(np.median(seconds['extend'])) / num_extends,
  }
