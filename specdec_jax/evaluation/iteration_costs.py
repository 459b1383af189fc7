"""What an iteration's parts cost on this device."""

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from specdec_jax.base import Array, Drafter, LanguageModel, Params, Prompt
from specdec_jax.costs import measure
from specdec_jax.decoding import speculative
from specdec_jax.decoding.state import DecodeState
from specdec_jax.evaluation import benchmark
from specdec_jax.evaluation.benchmark import Side


class CostPrograms(NamedTuple):
  """What is timed for `costs`, to be run in turns with anything else.

  Attributes:
    programs: by name.
    costs: from the seconds and results of `measure.alternate` to figures.
  """

  programs: Mapping[str, Callable[[], Any]]
  costs: Callable[[Mapping[str, Any], Mapping[str, Any]], dict[str, Any]]


def costs(*args: Any, repeats: int, **options: Any) -> dict[str, Any]:
  """Times of an iteration's parts on this device, for one batch.

  Args:
    *args: of `cost_programs`, as is `options`, which says what comes back.
    repeats: timed runs of each.
    **options: see there.
  """
  made = cost_programs(*args, **options)
  return made.costs(*measure.alternate(made.programs, repeats))


def cost_programs(
  params: Params,
  rng_key: Array,
  prompt: Prompt,
  *,
  target: LanguageModel,
  drafters: Mapping[int, Drafter],
  max_len: int,
  widths: Sequence[int] | None = None,
  num_decodes: int = 1,
  plain: Side | None = None,
  **rule: Any,
) -> CostPrograms:
  """Compiles an iteration's parts for one batch.

  Args:
    params: weights of both sides.
    rng_key: as for `speculative.generate`.
    prompt: the batch.
    target: the target.
    drafters: the same drafter by gamma, 1 and the largest among them.
    max_len: as for `speculative.generate`.
    widths: of target calls to time, 1 and gamma + 1 among them; None means
      these and the middle.
    num_decodes: short decodes of one timing. The first of them finds nothing in
      the caches, which a small model notices.
    plain: of the same batch, what takes the place of the target's own call over
      one position: plain decoding may be quicker in another dtype.
    **rule: `verify_fn`, `logits_to_probs` and `eos_id`.

  Returns:
    Programs, and a function to the fields of `theory.planner.Costs` but
    `c_hat`, in seconds, and `extend_seconds` of the widest target call by
    itself: what is missing to its `target_seconds` is sampling, verification
    and the loop.
  """
  max_gamma = max(drafters)
  widths = sorted(widths or {1, 1 + -(-max_gamma // 2), max_gamma + 1})
  shared: dict[str, Any] = {'target': target, 'max_len': max_len, **rule}
  if plain is None:
    plain_rule = {k: v for k, v in shared.items() if k != 'verify_fn'}
    plain = benchmark.plain_side(params, rng_key, [prompt], **plain_rule)
  sides = {1: benchmark.shortened(plain)} | {
    width: benchmark.full_width_side(
      params, rng_key, [prompt], gamma=width - 1, **shared
    )
    for width in widths[1:]
  }
  drafted = benchmark.shortened(
    benchmark.speculative_side(
      params, rng_key, [prompt], drafter=drafters[max_gamma], **shared
    )
  )
  proposals = {
    gamma: measure.propose_programs(
      params,
      _start(params, rng_key, prompt, target, drafter, max_len),
      drafter,
      target,
    )
    for gamma, drafter in sorted(drafters.items())
  }
  named = {f'{width} positions': side for width, side in sides.items()}
  named['drafted'] = drafted
  decodes: dict[str, Callable[[], Any]] = {
    name: dataclasses.replace(side, states=[*side.states] * num_decodes).decode
    for name, side in named.items()
  }
  extend = measure.repeated(
    params, sides[widths[-1]].states[0], target=target, width=widths[-1]
  )

  programs = decodes | {'extend': extend}
  for gamma, made in proposals.items():
    programs |= {f'draft {gamma}, {i}': each for i, each in enumerate(made)}
  figures = functools.partial(
    _cost_figures,
    widths=widths,
    proposals=proposals,
    num_extends=extend.num_calls,
    is_short=drafters[max_gamma].may_abstain,
  )
  return CostPrograms(programs, figures)


def _cost_figures(
  seconds: Mapping[str, Any],
  results: Mapping[str, Any],
  *,
  widths: Sequence[int],
  proposals: Mapping[int, Sequence[measure.Repeated]],
  num_extends: int,
  is_short: bool,
) -> dict[str, Any]:
  """The figures of `cost_programs`; `is_short` if iterations may score one
  position, so that the mean iteration says nothing of the loop."""

  def iteration(name: str) -> float:
    return float(np.median(seconds[name])) / _num_iterations(results[name])

  propose = {
    gamma: measure.propose_seconds(
      programs, [seconds[f'draft {gamma}, {i}'] for i in range(len(programs))]
    )
    for gamma, programs in proposals.items()
  }
  target = [iteration(f'{width} positions') for width in widths]
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
    'extend_seconds': float(np.median(seconds['extend'])) / num_extends,
  }


def _start(params, rng_key, prompt, target, drafter, max_len) -> DecodeState:
  init = functools.partial(
    speculative.init, target=target, drafter=drafter, max_len=max_len
  )
  return jax.jit(init)(params, rng_key, prompt)


def _num_iterations(states: Sequence[DecodeState]) -> int:
  return sum(int(s.statistics.num_target_runs.max()) for s in states)
