"""Decodes batches of texts with a decoder: whole, or iteration by iteration."""

import dataclasses
from collections.abc import Callable, Generator, Sequence
from typing import Protocol, TypeVar

import jax
import numpy as np

from specdec_jax.assembly.decoder import Decoder
from specdec_jax.base import Params
from specdec_jax.decoding import speculative
from specdec_jax.decoding.program import Part, Program
from specdec_jax.decoding.state import DecodeOutput
from specdec_jax.measure import exact_bits
from specdec_jax.text import prompts, stop_strings
from specdec_jax.text.prompts import Batch, Text
from specdec_jax.trace import recording

Show = Callable[[recording.Record], None]
# From a batch, and from what is shown every iteration record, to the output.
Decode = Callable[[Batch, Sequence[Show]], DecodeOutput]
# The records of each iteration, and in the end the output.
Iterations = Generator[list[recording.Record], None, DecodeOutput]
Result = TypeVar('Result')
# New tokens for which a program has room, or a multiple of them.
_ROOM = 64


class Call(Protocol):
  """Calls a function; the command line does so where it can be interrupted."""

  def __call__(self, function: Callable[[], Result], /) -> Result: ...


def at_once(function: Callable[[], Result], /) -> Result:
  """Calls a function as Python does."""
  return function()


@dataclasses.dataclass(frozen=True, kw_only=True)
class DecodeSettings:
  """What a decode needs to know beside its decoder; see `api.generate`. `call`
  calls whatever takes long. Raises ValueError if a number is out of range, a
  string is empty, or two of them do not go together."""

  max_new_tokens: int
  batch_size: int = 1
  chat: bool = False
  system: str | None = None
  seed: int = 0
  stop: Sequence[str] = ()
  num_devices: int = 1
  call: Call = at_once

  def __post_init__(self):
    check_count('max_new_tokens', self.max_new_tokens)
    check_count('batch_size', self.batch_size)
    check_count('num_devices', self.num_devices)
    check_seed(self.seed)
    if self.system is not None and not self.chat:
      raise ValueError('system is for chat, which is not given')
    if self.batch_size % self.num_devices:
      raise ValueError(
        f'a batch of {self.batch_size} rows does not divide over '
        f'{self.num_devices} devices'
      )
    if isinstance(self.stop, str):
      raise ValueError('stop is a string: give a list of them')
    for stop in self.stop:
      if not isinstance(stop, str) or not stop:
        raise ValueError(f'a stop string is empty, or no string: {stop!r}')

  def for_rows(self, num_rows: int) -> 'DecodeSettings':
    """With no more rows in a batch than there are, as many per device."""
    # Of 5 rows on 4 devices: a batch of 8 at most, 2 for each.
    rows = num_rows + -num_rows % self.num_devices
    size = min(self.batch_size, rows)
    return dataclasses.replace(self, batch_size=size)


def check_count(name: str, value: int) -> None:
  """Raises ValueError unless `value` is an integer of at least 1."""
  if type(value) is not int or value < 1:
    raise ValueError(f'{name} should be a positive integer, got {value!r}')


def check_seed(seed: int) -> None:
  """Raises ValueError unless `seed` is an integer from 0 to 2**32 - 1."""
  if type(seed) is not int or not 0 <= seed < 2**32:
    raise ValueError(f'seed should be from 0 to 2**32 - 1, got {seed!r}')


def pack(
  decoder: Decoder,
  texts: Sequence[Text],
  settings: DecodeSettings,
  num_samples: int = 1,
) -> list[Batch]:
  """Packs texts in batches of one shape, each text in `num_samples` rows.

  Raises ValueError if a prompt is too long for the context or has no tokens, or
  no text of the vocabulary holds a stop string.
  """
  stop_strings.check_vocabulary(settings.stop, decoder.vocabulary)
  num_new, limit = settings.max_new_tokens, decoder.max_positions
  rows = prompts.encode(
    decoder.vocabulary,
    texts,
    config=decoder.config,
    is_chat=settings.chat,
    system=settings.system,
  )
  for i, row in enumerate(rows, start=1):
    if len(row) >= limit:
      raise ValueError(
        f'prompt {i} has {len(row)} tokens, and the context is {limit}: '
        'shorten it'
      )
    # Of a prompt of 90 tokens and 40 new ones in a context of 128, lower to 38.
    needed = prompts.num_positions(decoder.config, len(row), num_new)
    if needed > limit:
      raise ValueError(
        f'prompt {i} has {len(row)} tokens and with {num_new} new ones '
        f'exceeds the context of {limit}: lower max_new_tokens to '
        f'{num_new - (needed - limit)}'
      )
  # Two samples of a and b are rows a, a, b, b.
  repeat = lambda items: [x for x in items for _ in range(num_samples)]
  return prompts.batches(
    repeat(texts),
    repeat(rows),
    config=decoder.config,
    batch_size=settings.batch_size,
    max_new_tokens=num_new,
  )


def max_length(decoder: Decoder, batch: Batch, max_new_tokens: int) -> int:
  """Returns `max_len` for batches of one shape, with room to spare: a row's own
  limit is data, and another one soon finds its program compiled."""
  # After prompts of up to 64 tokens, 1 to 64 new ones have room for 128 in all,
  # unless a drafter's table of positions ends before.
  needed = batch.prompt.decoder_tokens.shape[1] + max_new_tokens
  roomy = needed + -max_new_tokens % _ROOM
  return max(needed, min(roomy, decoder.max_drafted - decoder.drafter.gamma))


def sharding(num_devices: int, *, is_batch: bool) -> jax.sharding.Sharding:
  """Says where arrays lie on the devices that share a batch: rows are split,
  weights are everywhere. See `sharding.mesh.check_devices`."""
  devices = jax.devices()
  if num_devices == 1:
    return jax.sharding.SingleDeviceSharding(devices[0])
  mesh = jax.make_mesh(
    (num_devices,),
    ('data',),
    axis_types=(jax.sharding.AxisType.Auto,),
    devices=devices[:num_devices],
  )
  spec = jax.sharding.PartitionSpec('data' if is_batch else None)
  return jax.sharding.NamedSharding(mesh, spec)


def place(tree: Result, num_devices: int, *, is_batch: bool) -> Result:
  """Puts a tree of arrays on the devices that `sharding` names."""
  return jax.device_put(tree, sharding(num_devices, is_batch=is_batch))


def compiled(
  decoder: Decoder,
  first: Batch,
  settings: DecodeSettings,
  parts: Callable[[Program], Sequence[Part]],
) -> tuple[Params, Sequence[jax.stages.Compiled]]:
  """Compiles parts of a program for batches of the shape of `first`, and places
  the weights on the devices that share them.

  The decoder keeps what was compiled: it depends neither on the seed nor on
  stop strings. Raises ValueError if its gamma is yet to be measured, or
  `exact_bits` cannot be kept.
  """
  if decoder.is_auto:
    raise ValueError('gamma auto is not measured here: give a number')
  num_devices = settings.num_devices
  params = place(decoder.params, num_devices, is_batch=False)
  # `parts` is a function of a module, so that it is a key: a lambda, made anew
  # at each call, would be compiled each time.
  shapes = str(jax.tree.map(lambda leaf: leaf.shape, first.prompt))
  max_len = max_length(decoder, first, settings.max_new_tokens)
  key = (parts, shapes, max_len, num_devices)
  # Weights are arguments: the programs serve whatever lies in their place.
  if key not in decoder.programs:
    prompt = place(first.prompt, num_devices, is_batch=True)
    if decoder.exact_bits:
      settings.call(
        lambda: exact_bits.check(
          decoder.method, params.target, prompt, max_len=max_len
        )
      )
    program = Program(
      method=decoder.method,
      params=params,
      prompt=prompt,
      max_len=max_len,
      places=sharding(num_devices, is_batch=True),
    )
    decoder.programs[key] = settings.call(
      lambda: [part.compile()[0] for part in parts(program)]
    )
  return params, decoder.programs[key]


def compile_decode(
  decoder: Decoder,
  first: Batch,
  settings: DecodeSettings,
  *,
  is_shown: bool = False,
) -> Decode:
  """Compiles the decoding of batches of the shape of `first`: as one program,
  or iteration by iteration, if each is shown or may complete a stop string."""
  if is_shown or settings.stop:
    # The host sees each iteration, which a loop in one program hides from it.
    iterate = compile_iterations(decoder, first, settings)
    return lambda batch, shows: _shown(iterate(batch), shows)
  params, [generate] = compiled(decoder, first, settings, _whole)
  key = jax.random.key(settings.seed)

  def decode(batch: Batch, shows: Sequence[Show]) -> DecodeOutput:
    prompt = place(batch.prompt, settings.num_devices, is_batch=True)
    made = lambda: jax.block_until_ready(generate(params, key, prompt))
    return settings.call(made)

  return decode


def _whole(program: Program) -> Sequence[Part]:
  return [program.whole]


def _stepwise(program: Program) -> Sequence[Part]:
  return [program.prefill, program.step(recording.gather)]


def _shown(iterations: Iterations, shows: Sequence[Show]) -> DecodeOutput:
  """Shows the records of each iteration as soon as they are there."""
  while True:
    try:
      records = next(iterations)
    except StopIteration as end:
      return end.value
    for record in records:
      for show in shows:
        show(record)


def compile_iterations(
  decoder: Decoder, first: Batch, settings: DecodeSettings
) -> Callable[[Batch], Iterations]:
  """Compiles prefill and a step, to a generator of each step's records."""
  params, [prefill, step] = compiled(decoder, first, settings, _stepwise)
  key = jax.random.key(settings.seed)

  def iterate(batch: Batch) -> Iterations:
    prompt = place(batch.prompt, settings.num_devices, is_batch=True)
    state = prefill(params, key, prompt)
    # Records of one iteration need the text that came before it.
    traced = recording.init(batch.prompt)
    end_rows = None
    if settings.stop:
      end_rows = stop_strings.watch(
        decoder.vocabulary, settings.stop, num_rows=state.done.size
      )
    while not np.all(state.done):
      # Copies: the step writes where these are, as it does in the caches.
      before = jax.tree.map(np.array, state.statistics)
      state, info = step(params, state)
      if end_rows is not None:
        state, info = end_rows(before, state, info)
      records, traced = recording.iteration_records(
        info, traced, decoder.vocabulary.pieces
      )
      yield records
    return speculative.output(state)

  return iterate
