"""Ways of decoding some prompts, compiled, to be timed against each other."""

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from specdec_jax.base import (
  Array,
  Drafter,
  LanguageModel,
  Params,
  Prompt,
  Tree,
)
from specdec_jax.decoding import autoregressive, speculative, statistics
from specdec_jax.decoding.method import Method
from specdec_jax.decoding.state import DecodeState
from specdec_jax.measure import stopwatch

# Tokens of the short decodes that only serve to time an iteration.
_NUM_TIMED_TOKENS = 24


@dataclasses.dataclass(frozen=True, kw_only=True)
class Side:
  """One way of decoding, compiled, and its states after the prefill.

  Attributes:
    run: `(params, state) -> state`, compiled.
    params: its first argument.
    states: one per batch.
    compile_seconds: of loop and prefill, unless that is another side's.
    prefill_seconds: of all batches, warm.
  """

  run: Callable[[Params, DecodeState], DecodeState]
  params: Params
  states: Sequence[DecodeState]
  compile_seconds: float
  prefill_seconds: float

  def decode(self) -> list[DecodeState]:
    """Decodes every batch."""
    return [self.run(self.params, state) for state in self.states]


def _compile(
  init: Callable[[Params, Array, Prompt], DecodeState],
  run: Callable[[Params, DecodeState], DecodeState],
  params: Params,
  rng_key: Array,
  prompts: Sequence[Prompt],
) -> Side:
  """Compiles prefill and loop for prompts of one shape, and prefills them."""
  first = params, rng_key, prompts[0]
  init, init_seconds = stopwatch.compile_seconds(init, *first)
  jax.block_until_ready(init(*first))
  states, prefill_seconds = stopwatch.run_seconds(
    lambda: [init(params, rng_key, prompt) for prompt in prompts]
  )
  run, seconds = stopwatch.compile_seconds(run, params, states[0])
  return Side(
    run=run,
    params=params,
    states=states,
    compile_seconds=init_seconds + seconds,
    prefill_seconds=prefill_seconds,
  )


def plain_side(
  params: Params,
  rng_key: Array,
  prompts: Sequence[Prompt],
  *,
  method: Method,
  max_len: int,
) -> Side:
  """Plain decoding, compiled."""
  init = functools.partial(autoregressive.init, method=method, max_len=max_len)
  run = functools.partial(autoregressive.run, method=method)
  return _compile(init, run, params, rng_key, prompts)


def speculative_side(
  params: Params,
  rng_key: Array,
  prompts: Sequence[Prompt],
  *,
  method: Method,
  max_len: int,
  like: Side | None = None,
) -> Side:
  """Speculative decoding, compiled.

  `like` is a side of the same models and prompts whose drafts are at least as
  long: its prefill then serves here, too, and is not compiled again.
  """
  run = functools.partial(speculative.run, method=method)
  if like is None:
    init = functools.partial(speculative.init, method=method, max_len=max_len)
    return _compile(init, run, params, rng_key, prompts)
  states = [
    dataclasses.replace(
      state, statistics=statistics.init(state.done.size, method.drafter.gamma)
    )
    for state in like.states
  ]
  compiled, seconds = stopwatch.compile_seconds(run, params, states[0])
  return dataclasses.replace(
    like, run=compiled, states=states, compile_seconds=seconds
  )


def full_width_side(
  params: Params,
  rng_key: Array,
  prompts: Sequence[Prompt],
  *,
  method: Method,
  max_len: int,
  gamma: int,
  vocab_size: int | None = None,
  may_abstain: bool = False,
  tree: Tree | None = None,
  like: Side | None = None,
) -> Side:
  """A few iterations of `method` that all score gamma + 1 positions, on one
  batch; `vocab_size`, `may_abstain` and `tree` as for `stopwatch.always_full`,
  which takes the drafter's place."""
  drafter = stopwatch.always_full(
    gamma, vocab_size, may_abstain=may_abstain, tree=tree
  )
  side = speculative_side(
    Params(params.target, jnp.bool_(True)) if may_abstain else params,
    rng_key,
    prompts[:1],
    method=dataclasses.replace(method, drafter=drafter),
    max_len=max_len,
    like=like,
  )
  return shortened(side)


def without_drafts(full_width: Side) -> Side:
  """The same program, made with `may_abstain`, when there is never a draft."""
  params = Params(full_width.params.target, jnp.bool_(False))
  return dataclasses.replace(full_width, params=params)


def shorten(
  state: DecodeState, num_tokens: int = _NUM_TIMED_TOKENS
) -> DecodeState:
  """A state that ends after a few tokens."""
  limits = jnp.minimum(state.max_lengths, state.context.lengths + num_tokens)
  return dataclasses.replace(state, max_lengths=limits)


def shortened(side: Side, num_batches: int = 1) -> Side:
  """A side that decodes a few tokens of its first batches."""
  states = list(map(shorten, side.states[:num_batches]))
  return dataclasses.replace(side, states=states)


def finished(side: Side) -> Side:
  """A side whose first batch is already decoded: its time is what a decode
  costs beyond its iterations."""
  state = side.states[0]
  done = dataclasses.replace(state, done=jnp.ones_like(state.done))
  return dataclasses.replace(side, states=[done])


def propose_programs(
  drafted: Side, drafter: Drafter, target: LanguageModel, is_adaptive: bool
) -> tuple[stopwatch.Repeated, ...]:
  """What times a full draft, compiled: `stopwatch.propose_programs`, by a state
  of `drafter`'s own where it is the drafted side's without what varies."""
  state = drafted.states[0]
  if is_adaptive:
    state = dataclasses.replace(state, drafter_state=state.drafter_state.cache)
  return stopwatch.propose_programs(drafted.params, state, drafter, target)


def fastest(
  candidates: Mapping[str, Side], num_batches: int = 6, repeats: int = 3
) -> tuple[str, dict[str, float]]:
  """The fastest of several plain configurations, on the first batches, and the
  tokens per second of each, by the median time of every batch. Texts end at
  their EOS, so that what a configuration costs once per decode counts."""
  decodes = {
    (name, i): functools.partial(side.run, side.params, state)
    for name, side in candidates.items()
    for i, state in enumerate(shortened(side, num_batches).states)
  }
  seconds, states = stopwatch.alternate(decodes, repeats)
  speeds = {}
  for name in candidates:
    own = [key for key in decodes if key[0] == name]
    tokens = sum(int(states[key].statistics.num_tokens.sum()) for key in own)
    speeds[name] = tokens / sum(float(np.median(seconds[key])) for key in own)
  return max(speeds, key=speeds.__getitem__), speeds
