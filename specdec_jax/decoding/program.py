"""A method's compiled programs, in one place for every entry point: their
shapes, the shardings of their results and the buffers they donate."""

import dataclasses
import functools
import time
import types
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Sharding

from specdec_jax.base import Array, Params, Prompt
from specdec_jax.decoding import autoregressive, reading, refill, speculative
from specdec_jax.decoding import state as state_lib
from specdec_jax.decoding.method import Method
from specdec_jax.decoding.speculative import StepInfo
from specdec_jax.decoding.state import DecodeOutput, DecodeState


class Part(NamedTuple):
  """One program, which can be compiled ahead of its first call.

  Attributes:
    jitted: the jitted function, with its donated arguments.
    args: what it is lowered for: arrays, or shapes with their shardings.
  """

  jitted: Any
  args: tuple[Any, ...]

  def lower(self, *args: Any) -> jax.stages.Lowered:
    """Lowers the program for `args`, by default its own."""
    return self.jitted.lower(*(args or self.args))

  def compile(self, *args: Any) -> tuple[jax.stages.Compiled, float]:
    """Compiles the program for `args`, by default its own, and returns the
    seconds that took, which a persistent compilation cache shortens."""
    started = time.perf_counter()
    compiled = self.lower(*args).compile()
    return compiled, time.perf_counter() - started


class Refill(NamedTuple):
  """Programs of a batch whose finished rows are replaced.

  Attributes:
    init: `(params, seed, prompt[N]) -> state[N]`.
    idle: `(state[N]) -> state[B]`, all rows finished.
    replace: `(state[B], fresh[N], sources[B]) -> state[B]`, in place.
    run: `(params, state[B], num_done) -> (state[B], output)`, in place.
    batch_size: B, rows decoded at once.
    refill_size: N, rows replaced at once, at most B.
  """

  init: Callable[[Params, Any, Prompt], DecodeState]
  idle: Callable[[DecodeState], DecodeState]
  replace: Callable[[DecodeState, DecodeState, Any], DecodeState]
  run: Callable[[Params, DecodeState, Any], tuple[DecodeState, DecodeOutput]]
  batch_size: int
  refill_size: int


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Program:
  """The programs of a method for batches of one shape. Each part is compiled by
  itself, on demand.

  Attributes:
    method: what is compiled.
    params: weights of both sides, or their shapes with their shardings.
    prompt: any of the batches, or its shapes.
    rng_key: keys of the rows, or their shape; None is one key for all.
    max_len: as for `speculative.generate`.
    places: a state's sharding, one for all its arrays, or a function from their
      shapes to theirs. None leaves it to the compiler, which may then return a
      state with other shardings than it accepts.
    is_plain: whether `autoregressive` decodes, whatever the method drafts.
  """

  method: Method
  params: Params
  prompt: Prompt
  rng_key: Any = None
  max_len: int
  places: Sharding | Callable[[Any], Any] | None = None
  is_plain: bool = False

  @functools.cached_property
  def state(self) -> DecodeState:
    """Shapes after the prefill, with their shardings."""
    shapes = jax.eval_shape(self._init, self.params, self._key, self.prompt)
    if self.places is None:
      return shapes
    # A single sharding is a prefix of the pytree: it holds for all its arrays.
    put = lambda place, tree: jax.tree.map(
      lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place), tree
    )
    return jax.tree.map(put, self._shardings(shapes), shapes)

  @property
  def whole(self) -> Part:
    """`(params, rng_key, prompt) -> output`: prefill and loop in one."""
    generate = functools.partial(
      self._loop.generate, method=self.method, max_len=self.max_len
    )
    return Part(jax.jit(generate), (self.params, self._key, self.prompt))

  @property
  def prefill(self) -> Part:
    """`(params, rng_key, prompt) -> state`."""
    init = jax.jit(self._init, out_shardings=self._shardings(self.state))
    return Part(init, (self.params, self._key, self.prompt))

  @property
  def read_on(self) -> Part:
    """`(params, rng_key, whole_prompt, state) -> (state, num_fed)`, in place,
    for prompts as wide as the state's buffer; see `reading.read_on`."""
    tokens = self.state.context.tokens
    prompt = dataclasses.replace(self.prompt, decoder_tokens=tokens)
    jitted = jax.jit(
      functools.partial(reading.read_on, method=self.method),
      donate_argnums=3,
      out_shardings=(self._shardings(self.state), None),
    )
    return Part(jitted, (self.params, self._key, prompt, self.state))

  def step(self, show: Callable[[StepInfo], Any] = lambda info: None) -> Part:
    """`(params, state) -> (state, shown)`: one iteration, in place. `show`
    picks what the host sees of it."""
    places = self._shardings(self.state), None
    jitted = jax.jit(self._step(show), donate_argnums=1, out_shardings=places)
    return Part(jitted, (self.params, self.state))

  def stepwise(self, show: Callable[[StepInfo], Any]) -> tuple[Part, Part]:
    """Returns the program that iterates and the one that undoes part of the
    last iteration, both in place.

    The first is `(params, state, count) -> (state, output, shown)`: at most
    `count` iterations, fewer if every row is done; `show` picks what the host
    sees of the last. The second is `state.truncate`, with the draft and the
    verification that `show` picks.
    """
    step = jax.jit(self._step(show), inline=True)  # Traced once for two uses.
    shown = jax.eval_shape(step, self.params, self.state)[1]

    def iterate(params: Params, state: DecodeState, count: Any) -> Any:
      zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shown)
      _, state, last = jax.lax.while_loop(
        lambda loop: (loop[0] < count) & ~jnp.all(loop[1].done),
        lambda loop: (loop[0] + 1, *step(params, loop[1])),
        (jnp.zeros_like(count), state, zeros),
      )
      return state, speculative.output(state), last

    place, state = self._shardings(self.state), self.state
    iterations = jax.jit(
      iterate, donate_argnums=1, out_shardings=(place, None, None)
    )
    last_step = shown.draft, shown.verification, shown.counts
    return (
      Part(iterations, (self.params, state, np.int32(1))),
      Part(
        jax.jit(state_lib.truncate, donate_argnums=0, out_shardings=place),
        (state, state.statistics, *last_step, state.done),
      ),
    )

  def _step(self, show: Callable[[StepInfo], Any]) -> Callable[..., Any]:
    def step(params: Params, state: DecodeState) -> tuple[DecodeState, Any]:
      state, info = speculative.step(params, state, method=self.method)
      return state, show(info)

    return step

  @property
  def run(self) -> Part:
    """`(params, state) -> state`, until every row is done. The given state is
    not donated, so that it can be run again."""
    run = functools.partial(self._loop.run, method=self.method)
    return Part(jax.jit(run), (self.params, self.state))

  def refill(self, batch_size: int, output_sharding: Any = None) -> Refill:
    """Returns the programs of a batch of `batch_size` rows in which as many
    finished rows as `prompt` has are replaced at once: more mean fewer
    prefills, but a longer wait for them. Each is compiled at its first call.
    Results have `output_sharding`, so that this process can read them. Raises
    ValueError if `prompt` has more rows than the batch."""
    num_fresh = self.prompt.decoder_lengths.shape[0]
    if num_fresh > batch_size:
      raise ValueError(
        f'{num_fresh} rows cannot be refilled at once in a batch of '
        f'{batch_size}'
      )
    idle = functools.partial(refill.idle, num_rows=batch_size)

    def init(params: Params, seed: Any, prompt: Prompt) -> DecodeState:
      return self._init(params, jax.random.key(seed), prompt)

    def run(params: Params, state: DecodeState, num_done: Any):
      state = speculative.run(
        params, state, method=self.method, num_done=num_done
      )
      return state, speculative.output(state)

    fresh = jax.eval_shape(init, self.params, 0, self.prompt)
    places = self._shardings(jax.eval_shape(idle, fresh))
    return Refill(
      init=jax.jit(init),
      # Stated, not inferred: for other shardings a program compiles again.
      idle=jax.jit(idle, out_shardings=places),
      replace=jax.jit(
        refill.replace_rows, donate_argnums=0, out_shardings=places
      ),
      run=jax.jit(
        run, donate_argnums=1, out_shardings=(places, output_sharding)
      ),
      batch_size=batch_size,
      refill_size=num_fresh,
    )

  @property
  def _loop(self) -> types.ModuleType:
    return autoregressive if self.is_plain else speculative

  @property
  def _key(self) -> Any:
    if self.rng_key is not None:
      return self.rng_key
    return jax.eval_shape(lambda: jax.random.key(0))

  def _init(self, params: Params, key: Array, prompt: Prompt) -> DecodeState:
    return self._loop.init(
      params, key, prompt, method=self.method, max_len=self.max_len
    )

  def _shardings(self, shapes: DecodeState) -> Any:
    return self.places(shapes) if callable(self.places) else self.places
