"""Compiled decoding loops, to be timed against each other."""

import dataclasses
import functools
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from specdec_jax.base import Array, Params, Prompt
from specdec_jax.decoding import rates as metrics
from specdec_jax.decoding import statistics
from specdec_jax.decoding.method import Method
from specdec_jax.decoding.program import Program
from specdec_jax.decoding.rates import Counts
from specdec_jax.decoding.state import DecodeState
from specdec_jax.drafters.always_full import always_full
from specdec_jax.measure import stopwatch

Name = TypeVar('Name')

# Tokens of the short decodes that only serve to time an iteration.
_NUM_TIMED_TOKENS = 24


@dataclasses.dataclass(frozen=True, kw_only=True)
class CompiledLoop:
  """A compiled decoding loop, with its params and states after the prefill.

  Attributes:
    program: the program before compilation.
    run: the compiled loop, `(params, state) -> state`.
    params: weights.
    states: one per batch, after the prefill.
    prefill: the compiled prefill, from a batch of the same shape to its state.
    compile_seconds: of the loop, and of the prefill unless it is shared.
    prefill_seconds: of all batches, warm.
  """

  program: Program
  run: Callable[[Params, DecodeState], DecodeState]
  params: Params
  states: Sequence[DecodeState]
  prefill: Callable[[Prompt], DecodeState]
  compile_seconds: float
  prefill_seconds: float

  def decode(self) -> list[DecodeState]:
    """Decodes every batch."""
    return [self.run(self.params, state) for state in self.states]

  def on(self, prompts: Sequence[Prompt]) -> 'CompiledLoop':
    """Returns the same for other batches of the shape."""
    states, seconds = stopwatch.run_seconds(
      lambda: [self.prefill(prompt) for prompt in prompts]
    )
    return dataclasses.replace(self, states=states, prefill_seconds=seconds)


def compile_loop(
  params: Params,
  rng_key: Array,
  prompts: Sequence[Prompt],
  *,
  method: Method,
  max_len: int,
  is_plain: bool,
) -> CompiledLoop:
  """Compiles prefill and loop for prompts of one shape, and prefills them."""
  program = Program(
    method=method,
    params=params,
    prompt=prompts[0],
    max_len=max_len,
    is_plain=is_plain,
  )
  prefill, prefill_seconds = program.prefill.compile(
    params, rng_key, prompts[0]
  )
  # The loop is compiled for this state. This first prefill is not timed; those
  # of `on` are warm.
  first = jax.block_until_ready(prefill(params, rng_key, prompts[0]))
  run, run_seconds = program.run.compile(params, first)
  return CompiledLoop(
    program=program,
    run=run,
    params=params,
    states=(),
    prefill=functools.partial(prefill, params, rng_key),
    compile_seconds=prefill_seconds + run_seconds,
    prefill_seconds=0.0,
  ).on(prompts)


plain_loop = functools.partial(compile_loop, is_plain=True)
speculative_loop = functools.partial(compile_loop, is_plain=False)


def like(
  loop: CompiledLoop, method: Method, params: Params | None = None
) -> CompiledLoop:
  """Compiles a loop with another method over the states of a loop of the same
  target, which shares its prefill.

  Drafts of `loop` are at least as long, and its drafter has the same state, or
  that of `method` has none.
  """

  def counting(state: DecodeState) -> DecodeState:
    # Counters by position are as wide as the draft. All other buffers have room
    # for the longest draft, of which a shorter one uses a part.
    counters = statistics.init(state.done.size, method.depth)
    return dataclasses.replace(state, statistics=counters)

  params = loop.params if params is None else params
  states = list(map(counting, loop.states))
  program = dataclasses.replace(loop.program, method=method, params=params)
  run, seconds = program.run.compile(params, states[0])
  return dataclasses.replace(
    loop,
    program=program,
    run=run,
    params=params,
    states=states,
    prefill=lambda prompt: counting(loop.prefill(prompt)),
    compile_seconds=seconds,
  )


def full_width_loop(
  loop: CompiledLoop, gamma: int | None = None, vocab_size: int | None = None
) -> CompiledLoop:
  """Compiles a few iterations that all score gamma + 1 positions, on the first
  batch of a loop. The drafter is `drafters.always_full`, with the gamma and
  tree of the loop's drafter, or fewer tokens: `gamma`."""
  method = loop.program.method
  drafter = method.drafter
  full = always_full(
    drafter.gamma if gamma is None else gamma,
    vocab_size,
    may_abstain=drafter.may_abstain,
    tree=drafter.tree if gamma is None else None,
  )
  params = loop.params
  if drafter.may_abstain:
    # `always_full` reads from its params whether to draft: the program then has
    # both branches, as that of the drafter itself.
    params = Params(params.target, jnp.bool_(True))
  method = dataclasses.replace(method, drafter=full)
  return like(shortened(loop), method, params)


def without_drafts(full_width: CompiledLoop) -> CompiledLoop:
  """Returns a loop of `full_width_loop` whose drafter always abstains."""
  params = Params(full_width.params.target, jnp.bool_(False))
  return dataclasses.replace(full_width, params=params)


def shorten(state: DecodeState) -> DecodeState:
  """Returns a state that ends after a few tokens."""
  end = state.context.lengths + _NUM_TIMED_TOKENS
  limits = jnp.minimum(state.max_lengths, end)
  return dataclasses.replace(state, max_lengths=limits)


def shortened(loop: CompiledLoop, num_batches: int = 1) -> CompiledLoop:
  """Returns a loop that decodes a few tokens of its first batches."""
  states = list(map(shorten, loop.states[:num_batches]))
  return dataclasses.replace(loop, states=states)


def finished(loop: CompiledLoop) -> CompiledLoop:
  """Returns a loop whose first batch is done, to time a decode's launch."""
  # The loop's condition is false at once; the rest of the program runs.
  state = loop.states[0]
  done = dataclasses.replace(state, done=jnp.ones_like(state.done))
  return dataclasses.replace(loop, states=[done])


@dataclasses.dataclass(frozen=True)
class Timed:
  """Seconds of a loop by batch and turn, float64 `[N, R]`, and final states."""

  seconds: np.ndarray
  states: Sequence[DecodeState]

  @functools.cached_property
  def counts(self) -> Counts:
    return metrics.count([state.statistics for state in self.states])

  @functools.cached_property
  def num_tokens(self) -> np.ndarray:
    """Tokens of each batch, `[N]`."""
    return np.array([int(s.statistics.num_tokens.sum()) for s in self.states])

  @property
  def turns(self) -> np.ndarray:
    """Seconds of all batches in each turn, `[R]`."""
    return self.seconds.sum(axis=0)

  @property
  def total(self) -> float:
    """Seconds of all batches in the median turn."""
    return float(np.median(self.turns))

  @property
  def per_iteration(self) -> float:
    """Seconds of an iteration."""
    return self.total / self.counts.iterations

  @property
  def speed(self) -> float:
    """Tokens per second."""
    return float(self.num_tokens.sum() / self.total)


def calls(
  loops: Mapping[Name, CompiledLoop],
) -> dict[Hashable, Callable[[], DecodeState]]:
  """Returns calls for `stopwatch.alternate`, by loop and batch."""
  return {
    (name, i): functools.partial(loop.run, loop.params, state)
    for name, loop in loops.items()
    for i, state in enumerate(loop.states)
  }


def timed(
  loops: Mapping[Name, CompiledLoop],
  seconds: Mapping[Hashable, np.ndarray],
  results: Mapping[Hashable, DecodeState],
) -> dict[Name, Timed]:
  """Gathers what `stopwatch.alternate` returned for `calls`, by loop."""
  timed_loops = {}
  for name, loop in loops.items():
    keys = [(name, i) for i in range(len(loop.states))]
    loop_seconds = np.array([seconds[key] for key in keys])
    states = [results[key] for key in keys]
    timed_loops[name] = Timed(loop_seconds, states)
  return timed_loops


def fastest(
  candidates: Mapping[str, CompiledLoop], num_batches: int = 6, repeats: int = 3
) -> tuple[str, dict[str, float]]:
  """Returns the fastest of several plain configurations, timed on the first
  batches, and the tokens per second of each, by each batch's median time."""
  # Texts may end at EOS, so that what a decode costs once counts as well.
  short = {
    name: shortened(loop, num_batches) for name, loop in candidates.items()
  }
  results = timed(short, *stopwatch.alternate(calls(short), repeats))
  speeds = {
    name: float(result.num_tokens.sum() / np.median(result.seconds, 1).sum())
    for name, result in results.items()
  }
  return max(speeds, key=speeds.__getitem__), speeds
