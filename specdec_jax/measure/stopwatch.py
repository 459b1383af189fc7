"""Times on this device: decodes, target calls and drafts.

Programs are compiled before they are timed, run once to warm up, and timed in
alternation, so that a drift of the machine's speed falls on all of them alike.
"""

import dataclasses
import functools
import os
import time
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from concurrent import futures
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from specdec_jax import arrays
from specdec_jax.base import Drafter, LanguageModel, Params
from specdec_jax.decoding.state import DecodeState
from specdec_jax.launch import progress
from specdec_jax.sampling import keys

Name = TypeVar('Name', bound=Hashable)
Result = TypeVar('Result')
# The target's cache, the drafter's state and the last tokens.
_Carry = tuple[Any, Any, jax.Array]


def together(calls: Mapping[Name, Callable[[], Result]]) -> dict[Name, Result]:
  """Runs calls that compile, one thread per core; time nothing meanwhile."""

  def work() -> dict[Name, Result]:
    with futures.ThreadPoolExecutor(os.cpu_count()) as pool:
      pending = {name: pool.submit(call) for name, call in calls.items()}
      return {name: future.result() for name, future in pending.items()}

  return progress.interruptible(work)


def run_seconds(function: Callable, *args: Any) -> tuple[Any, float]:
  """Calls a function; returns its result, when it is ready, and the seconds."""
  started = time.perf_counter()
  result = jax.block_until_ready(function(*args))
  return result, time.perf_counter() - started


def alternate(
  programs: Mapping[Name, Callable[[], Result]],
  repeats: int,
  *,
  warm_up: Collection[Name] | None = None,
  title: str = '',
) -> tuple[dict[Name, np.ndarray], dict[Name, Result]]:
  """Runs each program `repeats` times, in turns.

  Args:
    programs: by name.
    repeats: timed runs of each.
    warm_up: names of programs to run once before; None: all.
    title: of a progress bar; empty for none.

  Returns seconds by program, float64 `[repeats]`, and the results of the last
  runs.
  """
  seconds: dict[Name, list[float]] = {name: [] for name in programs}
  results: dict[Name, Result] = {}
  first = list(programs if warm_up is None else warm_up)
  num_runs = len(first) + repeats * len(programs)
  with progress.bar(title, num_runs, is_shown=bool(title)) as bar:
    for name in first:
      run_seconds(programs[name])
      bar.advance(1)
    # The order of a and b is a b a b a b, so that a slower machine slows both.
    for _ in range(repeats):
      for name, program in programs.items():
        results[name], elapsed = run_seconds(program)
        bar.advance(1)
        seconds[name].append(elapsed)
  return {name: np.array(s) for name, s in seconds.items()}, results


@dataclasses.dataclass(frozen=True)
class Repeated:
  """A compiled loop over calls, timed as one: from a number of calls to an
  array."""

  program: Callable[[int], jax.Array]
  num_calls: int

  @property
  def launch(self) -> 'Repeated':
    """The same loop with 0 calls: what a program does once per decode, such as
    converting weights."""
    return Repeated(self.program, 0)

  def __call__(self) -> jax.Array:
    return self.program(self.num_calls)


def repeated(
  params: Params,
  state: DecodeState,
  *,
  target: LanguageModel | None,
  width: int = 1,
  drafter: Drafter | None = None,
) -> Repeated:
  """Compiles a loop of drafts (`target` None), of target calls over `width`
  positions (`drafter` None), or of both, that runs for about 0.1 seconds. No
  row of `state` has ended."""

  # The compiler would hoist what does not change in the loop, and delete what
  # is not used. So the context's length alternates between two values, and the
  # target's input depends on its last logits.
  def propose(params: Params, state: DecodeState, i: jax.Array, carry: _Carry):
    assert drafter is not None
    cache, drafter_state, last = carry
    lengths = jnp.maximum(state.context.lengths - i % 2, 1)
    draft_keys, _ = keys.iteration_keys(state.row_keys, lengths + i)
    draft, drafter_state = drafter.propose(
      params.drafter,
      draft_keys,
      dataclasses.replace(state.context, lengths=lengths),
      drafter_state,
      *((cache,) if drafter.reads_target_cache else ()),
    )
    last = jnp.where(jnp.sum(draft.tokens, axis=1) < 0, 0, last)
    if draft.probs is not None:
      last = jnp.where(jnp.max(draft.probs, axis=(1, 2)) > 2, 0, last)
    return cache, drafter_state, last

  def calls(params: Params, state: DecodeState, num_calls: jax.Array):
    lengths = state.context.lengths

    def body(i: jax.Array, carry: _Carry) -> _Carry:
      if drafter is not None:
        carry = propose(params, state, i, carry)
      if target is None:
        return carry
      cache, drafter_state, last = carry
      # `[B, width]`: the last token of a row in all of its positions.
      tokens = jnp.broadcast_to(last[:, None], (last.size, width))
      cache = target.rewind(cache, lengths - 1)
      logits, cache = target.extend(params.target, tokens, cache)
      return cache, drafter_state, arrays.argmax(logits[:, -1])

    start = (state.target_cache, state.drafter_state, jnp.zeros_like(lengths))
    return jax.lax.fori_loop(0, num_calls, body, start)[2]

  compiled = jax.jit(calls).lower(params, state, jnp.int32(1)).compile()
  # The number of calls is an argument: one program serves the launch, the
  # warm-up and the timed runs.
  program = lambda num_calls: compiled(params, state, jnp.int32(num_calls))
  run_seconds(program, 1)
  _, seconds = run_seconds(program, 4)
  num_calls = int(np.clip(0.1 / (seconds / 4), 4, 10_000))
  return Repeated(program, num_calls)


def propose_programs(
  params: Params,
  state: DecodeState,
  drafter: Drafter,
  target: LanguageModel,
  calls: Mapping[int, Repeated] | None = None,
) -> tuple[Repeated, ...]:
  """Compiles the programs of `propose_seconds`, each after its launch; `calls`
  are target calls by width that are compiled already."""
  # A drafter with weights is timed between target calls, and the same calls
  # are timed without it: alone, the weights of a small draft model would stay
  # in the processor's caches.
  compiled = functools.partial(repeated, params, state)
  if not jax.tree.leaves(params.drafter):
    program = compiled(target=None, drafter=drafter)
    return program.launch, program
  width = drafter.gamma + 1
  alone = (calls or {}).get(width) or compiled(target=target, width=width)
  both = compiled(target=target, width=width, drafter=drafter)
  return alone.launch, alone, both.launch, both


def propose_seconds(
  programs: Sequence[Repeated], seconds: Sequence[np.ndarray]
) -> float:
  """Returns the median seconds of one `propose`, from the times of
  `propose_programs`, float64 `[repeats]` each; 0 without programs."""
  if not programs:
    return 0.0
  # Pairs of a launch and the same with calls: `alone`, then `both`. The
  # difference of the two, per call, is a draft.
  differences = [
    (seconds[i + 1] - seconds[i]) / programs[i + 1].num_calls
    for i in range(0, len(programs), 2)
  ]
  draft = differences[-1]
  if len(differences) > 1:
    draft = differences[1] - differences[0]
  return max(float(np.median(draft)), 0.0)
