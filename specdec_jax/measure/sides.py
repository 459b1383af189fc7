"""Ways of decoding some prompts, compiled, to be timed against each other."""

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
from specdec_jax.measure import stopwatch

Name = TypeVar('Name')

# Tokens of the short decodes that only serve to time an iteration.
_NUM_TIMED_TOKENS = 24


@dataclasses.dataclass(frozen=True, kw_only=True)
class Side:
  """One way of decoding, compiled, and its states after the prefill.

  Attributes:
    program: what it was compiled of.
    run: `(params, state) -> state`, compiled, whose `params` these are.
    states: one per batch.
    prefill: from a batch of the same shape to its state, compiled.
    compile_seconds: of loop and prefill, unless that is another side's.
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

  def on(self, prompts: Sequence[Prompt]) -> 'Side':
    """Returns the same for other batches of the shape."""
    states, seconds = stopwatch.run_seconds(
      lambda: [self.prefill(prompt) for prompt in prompts]
    )
    return dataclasses.replace(self, states=states, prefill_seconds=seconds)


def compile_side(
  params: Params,
  rng_key: Array,
  prompts: Sequence[Prompt],
  *,
  method: Method,
  max_len: int,
  is_plain: bool,
) -> Side:
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
  # What the loop is compiled for. Its own prefill is not timed: those of `on`
  # are later, and warm.
  first = jax.block_until_ready(prefill(params, rng_key, prompts[0]))
  run, run_seconds = program.run.compile(params, first)
  return Side(
    program=program,
    run=run,
    params=params,
    states=(),
    prefill=functools.partial(prefill, params, rng_key),
    compile_seconds=prefill_seconds + run_seconds,
    prefill_seconds=0.0,
  ).on(prompts)


plain_side = functools.partial(compile_side, is_plain=True)
speculative_side = functools.partial(compile_side, is_plain=False)


def like(side: Side, method: Method, params: Params | None = None) -> Side:
  """Compiles another loop over the states of a side of the same target, with
  drafts at least as long, and the same kind of drafter or one without a state.
  The prefill serves here, too."""

  def counting(state: DecodeState) -> DecodeState:
    # Counters by position are as wide as the draft; all else has room for the
    # longest one, and a shorter draft leaves the rest of it unused.
    counters = statistics.init(state.done.size, method.depth)
    return dataclasses.replace(state, statistics=counters)

  params = side.params if params is None else params
  states = list(map(counting, side.states))
  program = dataclasses.replace(side.program, method=method, params=params)
  run, seconds = program.run.compile(params, states[0])
  return dataclasses.replace(
    side,
    program=program,
    run=run,
    params=params,
    states=states,
    prefill=lambda prompt: counting(side.prefill(prompt)),
    compile_seconds=seconds,
  )


def full_width_side(
  side: Side, gamma: int | None = None, vocab_size: int | None = None
) -> Side:
  """Compiles a few iterations that all score gamma + 1 positions, on the first
  batch of a side: `stopwatch.always_full` is in its drafter's place, with its
  gamma and tree unless `gamma` says fewer tokens."""
  method = side.program.method
  drafter = method.drafter
  full = stopwatch.always_full(
    drafter.gamma if gamma is None else gamma,
    vocab_size,
    may_abstain=drafter.may_abstain,
    tree=drafter.tree if gamma is None else None,
  )
  params = side.params
  if drafter.may_abstain:
    # `always_full` reads from its params whether it has a draft: one program
    # holds both kinds of iteration, as the drafter's own does.
    params = Params(params.target, jnp.bool_(True))
  method = dataclasses.replace(method, drafter=full)
  return like(shortened(side), method, params)


def without_drafts(full_width: Side) -> Side:
  """Returns the same, of a drafter that may abstain, when it always does."""
  params = Params(full_width.params.target, jnp.bool_(False))
  return dataclasses.replace(full_width, params=params)


def shorten(state: DecodeState) -> DecodeState:
  """Returns a state that ends after a few tokens."""
  end = state.context.lengths + _NUM_TIMED_TOKENS
  limits = jnp.minimum(state.max_lengths, end)
  return dataclasses.replace(state, max_lengths=limits)


def shortened(side: Side, num_batches: int = 1) -> Side:
  """Returns a side that decodes a few tokens of its first batches."""
  states = list(map(shorten, side.states[:num_batches]))
  return dataclasses.replace(side, states=states)


def finished(side: Side) -> Side:
  """Returns a side whose first batch is done: what a decode costs besides."""
  # The loop's condition is false at once, and all else of the program runs.
  state = side.states[0]
  done = dataclasses.replace(state, done=jnp.ones_like(state.done))
  return dataclasses.replace(side, states=[done])


@dataclasses.dataclass(frozen=True)
class Timed:
  """What decoding with a side has shown: seconds of each batch and turn,
  float64 `[N, R]`, and the states in which the batches ended."""

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
  sides: Mapping[Name, Side],
) -> dict[Hashable, Callable[[], DecodeState]]:
  """Returns what `stopwatch.alternate` times, by side and batch."""
  return {
    (name, i): functools.partial(side.run, side.params, state)
    for name, side in sides.items()
    for i, state in enumerate(side.states)
  }


def timed(
  sides: Mapping[Name, Side],
  seconds: Mapping[Hashable, np.ndarray],
  results: Mapping[Hashable, DecodeState],
) -> dict[Name, Timed]:
  """Gathers what `stopwatch.alternate` returned for `calls`, by side."""
  found = {}
  for name, side in sides.items():
    keys = [(name, i) for i in range(len(side.states))]
    found[name] = Timed(
      np.array([seconds[key] for key in keys]), [results[key] for key in keys]
    )
  return found


def fastest(
  candidates: Mapping[str, Side], num_batches: int = 6, repeats: int = 3
) -> tuple[str, dict[str, float]]:
  """Finds the fastest of several plain configurations, on the first batches,
  and the tokens per second of each, by the median time of every batch."""
  # Texts end at their EOS, so that what a configuration costs once per decode
  # counts.
  short = {n: shortened(side, num_batches) for n, side in candidates.items()}
  found = timed(short, *stopwatch.alternate(calls(short), repeats))
  speeds = {
    name: float(each.num_tokens.sum() / np.median(each.seconds, 1).sum())
    for name, each in found.items()
  }
  return max(speeds, key=speeds.__getitem__), speeds
