"""Times on the device at hand: whole decodes, target calls and drafts.

Programs are compiled before they are timed, run once to warm up, and timed in
alternation, so that a drift of the machine's speed falls on all of them alike.
"""

import dataclasses
import functools
import time
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from specdec_jax import arrays
from specdec_jax.base import Context, Draft, Drafter, LanguageModel, Params
from specdec_jax.decoding import keys
from specdec_jax.decoding.state import DecodeState


def compile_seconds(function: Callable, *args: Any) -> tuple[Any, float]:
  """Traces and compiles a function for `args`.

  Returns:
    The compiled program and the seconds that it took, which a persistent
    compilation cache shortens.
  """
  started = time.perf_counter()
  compiled = jax.jit(function).lower(*args).compile()
  return compiled, time.perf_counter() - started


def run_seconds(function: Callable, *args: Any) -> tuple[Any, float]:
  """A function's result, ready, and the seconds until it was."""
  started = time.perf_counter()
  result = jax.block_until_ready(function(*args))
  return result, time.perf_counter() - started


def alternate(
  programs: Mapping[str, Callable[[], Any]],
  repeats: int,
  advance: Callable[[int], None] = lambda num_done: None,
) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
  """Runs each program `repeats` times, in turns, after one run to warm up.

  Args:
    programs: what to time, by name.
    repeats: counted runs of each.
    advance: called with 1 after every run.

  Returns:
    Seconds of each program's runs, float64 `[repeats]`, and the results of its
    last run.
  """
  seconds: dict[str, list[float]] = {name: [] for name in programs}
  results: dict[str, Any] = {}
  for i in range(repeats + 1):
    for name, program in programs.items():
      results[name], elapsed = run_seconds(program)
      advance(1)
      if i:
        seconds[name].append(elapsed)
  return {name: np.array(s) for name, s in seconds.items()}, results


def always_full(gamma: int) -> Drafter:
  """Proposes gamma copies of the last token, at no cost: with it an iteration
  of the loop costs one target call over gamma + 1 positions. With gamma 0 it is
  a plain step."""

  def propose(params: Any, row_keys: jax.Array, context: Context, state: Any):
    del params, row_keys
    last = jnp.take_along_axis(
      context.tokens, context.lengths[:, None] - 1, axis=1
    )
    draft = Draft(
      tokens=jnp.repeat(last, gamma, axis=1),
      probs=None,
      lengths=jnp.full_like(context.lengths, gamma),
    )
    return draft, state

  return Drafter(gamma, lambda params, prompt, max_len: (), propose)


def repeat_propose(
  params: Params, state: DecodeState, num_calls: jax.Array, *, drafter: Drafter
) -> jax.Array:
  """Drafts `num_calls` times from about the same context, and nothing else.

  The context's length wavers by one token, so that no call's work can be moved
  out of the loop.

  Returns:
    int32 scalar, a sum of all drafted tokens; it only keeps them needed.
  """

  def body(i: jax.Array, carry: tuple[Any, jax.Array]):
    drafter_state, total = carry
    lengths = jnp.maximum(state.context.lengths - i % 2, 1)
    draft_keys, _ = keys.iteration_keys(state.row_keys, lengths + i)
    draft, drafter_state = drafter.propose(
      params.drafter,
      draft_keys,
      dataclasses.replace(state.context, lengths=lengths),
      drafter_state,
    )
    return drafter_state, total + jnp.sum(draft.tokens, dtype=jnp.int32)

  own = (
    state.target_cache if drafter.reads_target_cache else state.drafter_state
  )
  start = (own, jnp.zeros((), jnp.int32))
  return jax.lax.fori_loop(0, num_calls, body, start)[1]


def propose_seconds(
  params: Params, state: DecodeState, drafter: Drafter, *, repeats: int = 5
) -> float:
  """Median seconds of one `propose`, a loop of many timed as a whole."""
  program, _ = compile_seconds(
    functools.partial(repeat_propose, drafter=drafter),
    params,
    state,
    jnp.int32(1),
  )
  return _seconds_a_call(
    lambda n: program(params, state, jnp.int32(n)), repeats
  )


def extend_seconds(
  params: Params,
  state: DecodeState,
  target: LanguageModel,
  *,
  width: int,
  repeats: int = 5,
) -> float:
  """Median seconds of one target call over `width` positions, by itself.

  The cache is rewound after every call, and a call's tokens depend on the
  logits of the one before, so that none can be left out.
  """

  def body(_: jax.Array, carry: tuple[Any, Any, jax.Array], params: Any):
    cache, lengths, last = carry
    tokens = jnp.broadcast_to(last[:, None], (last.size, width))
    logits, cache = target.extend(params, tokens, target.rewind(cache, lengths))
    return cache, lengths, arrays.argmax(logits[:, -1])

  def repeat(params: Any, cache: Any, lengths: Any, num_calls: jax.Array):
    start = (cache, lengths, jnp.zeros_like(lengths))
    step = functools.partial(body, params=params)
    return jax.lax.fori_loop(0, num_calls, step, start)[2]

  args = (params.target, state.target_cache, state.context.lengths - 1)
  program, _ = compile_seconds(repeat, *args, jnp.int32(1))
  return _seconds_a_call(lambda n: program(*args, jnp.int32(n)), repeats)


def _seconds_a_call(
  program: Callable[[int], Any], repeats: int, duration: float = 0.2
) -> float:
  """Median seconds of a call that `program(n)` makes n times in a loop."""
  run_seconds(program, 1)
  _, once = run_seconds(program, 4)
  num_calls = int(np.clip(duration / (once / 4), 4, 10_000))
  seconds = [run_seconds(program, num_calls)[1] for _ in range(repeats)]
  return float(np.median(seconds)) / num_calls
