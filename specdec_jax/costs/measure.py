"""Times on the device at hand: whole decodes, target calls and drafts.

Programs are compiled before they are timed, run once to warm up, and timed in
alternation, so that a drift of the machine's speed falls on all of them alike.
"""

import dataclasses
import functools
import time
from collections.abc import Callable, Mapping, Sequence
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
  params: Params,
  state: DecodeState,
  num_calls: jax.Array,
  *,
  drafter: Drafter | None,
) -> jax.Array:
  """Reads the target's weights and drafts, `num_calls` times.

  Where both models are small, the one pushes the other's weights out of the
  caches: a draft costs what it costs in the loop only in the target's company.
  The context's length wavers by one token, so that no call's work can be moved
  out of the loop.

  Args:
    params: weights of both sides.
    state: a state that has not ended.
    num_calls: int32 scalar.
    drafter: None only reads.

  Returns:
    int32 scalar, made of all drafts; it only keeps them needed.
  """

  def body(i: jax.Array, carry: tuple[Any, jax.Array]):
    drafter_state, total = carry
    for leaf in jax.tree.leaves(params.target):
      above = leaf > (total % 2).astype(leaf.dtype)
      total = total + jnp.sum(above, dtype=jnp.int32)
    if drafter is None:
      return drafter_state, total
    lengths = jnp.maximum(state.context.lengths - i % 2, 1)
    draft_keys, _ = keys.iteration_keys(state.row_keys, lengths + i)
    draft, drafter_state = drafter.propose(
      params.drafter,
      draft_keys,
      dataclasses.replace(state.context, lengths=lengths),
      drafter_state,
    )
    total = total + jnp.sum(draft.tokens, dtype=jnp.int32)
    if draft.probs is not None:
      total = total + (jnp.max(draft.probs) > 2).astype(jnp.int32)
    return drafter_state, total

  reads_target = drafter is not None and drafter.reads_target_cache
  own = state.target_cache if reads_target else state.drafter_state
  start = (own, jnp.zeros((), jnp.int32))
  return jax.lax.fori_loop(0, num_calls, body, start)[1]


def propose_seconds(
  params: Params, state: DecodeState, drafter: Drafter, *, repeats: int = 5
) -> float:
  """Median seconds that one `propose` adds to what surrounds it, by loops of
  many calls: see `repeat_propose`."""

  def compiled(drafter: Drafter | None) -> Callable[[int], Any]:
    program, _ = compile_seconds(
      functools.partial(repeat_propose, drafter=drafter),
      params,
      state,
      jnp.int32(1),
    )
    return lambda n: program(params, state, jnp.int32(n))

  company, both = _seconds_a_call([compiled(None), compiled(drafter)], repeats)
  return max(float(np.median(both - company)), 0.0)


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
  (seconds,) = _seconds_a_call(
    [lambda n: program(*args, jnp.int32(n))], repeats
  )
  return float(np.median(seconds))


def _seconds_a_call(
  programs: Sequence[Callable[[int], Any]],
  repeats: int,
  duration: float = 0.2,
) -> np.ndarray:
  """Seconds of a call that `program(n)` makes n times in a loop: of programs
  that take turns, float64 `[programs, repeats]`."""
  num_calls = []
  for program in programs:
    run_seconds(program, 1)
    _, once = run_seconds(program, 4)
    num_calls.append(int(np.clip(duration / (once / 4), 4, 10_000)))
  turns = [
    [run_seconds(p, n)[1] / n for p, n in zip(programs, num_calls, strict=True)]
    for _ in range(repeats)
  ]
  return np.array(turns).T
