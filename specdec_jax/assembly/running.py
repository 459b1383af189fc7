"""Decodes batches of texts with a decoder: whole, or iteration by iteration."""

import concurrent.futures
import dataclasses
import itertools
import operator
from collections.abc import Callable, Collection, Generator, Mapping, Sequence
from typing import Any, TypeVar

import jax
import numpy as np

from specdec_jax.assembly import recording, text_settings
from specdec_jax.assembly.decoder import Decoder, ProgramKey
from specdec_jax.assembly.text_settings import DRAWN, NAMES, TextSettings
from specdec_jax.base import Array, Params, Prompt
from specdec_jax.decoding import exact_bits, step_values
from specdec_jax.decoding.program import Part, Program
from specdec_jax.decoding.state import DecodeOutput, DecodeState
from specdec_jax.sampling import keys
from specdec_jax.text import stop_strings
from specdec_jax.text.prompts import Batch

Show = Callable[[recording.Record], None]
# From a batch, and the functions that are shown each record, to the output.
Decode = Callable[[Batch, Sequence[Show]], DecodeOutput]
# Yields the records of each iteration, and returns the output.
Iterations = Generator[list[recording.Record], None, DecodeOutput]
Result = TypeVar('Result')
# Calls a function; the command line does so where it can be interrupted.
Call = Callable[[Callable[[], Result]], Result]
# Programs have room for a multiple of so many new tokens.
_ROOM = 128
# How many iterations one call makes.
_ONE, ALL, _NONE = np.int32(1), np.int32(2**31 - 1), np.int32(0)
# Settings that each text may have for itself.
PER_TEXT = ('max_new_tokens', *NAMES, 'seed', 'stop')

_UNSET = TextSettings()


def depth(name: str) -> int:
  """Returns how many levels of lists a value of a setting of a text has."""
  if name in NAMES:
    return text_settings.depth(name)
  return 1 if name == 'stop' else 0


@dataclasses.dataclass(frozen=True, kw_only=True)
class DecodeSettings:
  """The settings of a decode, beside its decoder; see `api.generate`.

  Raises ValueError if a number is out of range, a string is empty, or two
  settings do not go together.

  Attributes:
    text: how all texts are sampled; what it does not state is the decoder's.
    texts: settings of single texts, by the names of `PER_TEXT`, in place of
      those of all; for all texts or for none.
    stop: strings that end a text; None for the decoder's own.
    call: calls whatever takes long.
  """

  max_new_tokens: int
  text: TextSettings = _UNSET
  batch_size: int = 1
  chat: bool = False
  system: str | None = None
  seed: int = 0
  stop: Sequence[str] | None = ()
  num_devices: int = 1
  top_logprobs: int | None = None
  texts: Sequence[Mapping[str, Any]] = ()
  call: Call = operator.call

  def __post_init__(self):
    check_count('max_new_tokens', self.max_new_tokens)
    check_count('batch_size', self.batch_size)
    check_count('num_devices', self.num_devices)
    if self.top_logprobs is not None:
      check_count('top_logprobs', self.top_logprobs)
    check_seed(self.seed)
    if self.system is not None and not self.chat:
      raise ValueError('system is for chat, which is not given')
    if self.batch_size % self.num_devices:
      raise ValueError(
        f'batch_size: {self.batch_size} rows do not divide over '
        f'{self.num_devices} devices (num_devices)'
      )
    # An iterator would be empty once its strings are checked.
    stops = () if self.stop is None else self.stop
    if isinstance(stops, str) or not isinstance(stops, Collection):
      shown = 'a string' if isinstance(stops, str) else repr(stops)
      raise ValueError(f'stop is {shown}: give a list of strings')
    for stop in stops:
      if not isinstance(stop, str) or not stop:
        raise ValueError(f'a stop string is empty, or no string: {stop!r}')

  def for_rows(self, num_rows: int) -> 'DecodeSettings':
    """Returns the settings with a batch no larger than `num_rows` need, the
    same number on each device."""
    # Of 5 rows on 4 devices: a batch of 8 at most, 2 for each.
    rows = num_rows + -num_rows % self.num_devices
    size = min(self.batch_size, rows)
    return dataclasses.replace(self, batch_size=size)

  @property
  def num_rows(self) -> int:
    """Returns the rows of a batch's program: on each device a power of two, of
    which those beyond `batch_size` are finished before they begin."""
    per_device = self.batch_size // self.num_devices
    return self.num_devices * 2 ** (per_device - 1).bit_length()

  def of_text(self, i: int) -> 'DecodeSettings':
    """Returns the settings of one text; ValueError if one is out of range."""
    if not self.texts:
      return self
    overrides = dict(self.texts[i])
    text = text_settings.taken(overrides).over(self.text)
    return dataclasses.replace(self, text=text, texts=(), **overrides)

  @property
  def most_new_tokens(self) -> int:
    """Returns the largest limit of a text."""
    usual = self.max_new_tokens
    limits = [text.get('max_new_tokens', usual) for text in self.texts]
    return max(limits, default=usual)

  def sampling(self, usual: TextSettings) -> TextSettings:
    """Returns how a text is sampled, as `usual` where these settings state
    nothing; ValueError if a setting has no effect."""
    sampling = self.text.over(usual)
    # The decoder's own were checked as its rule reads them.
    if not self.text.explicit().keys().isdisjoint(DRAWN):
      sampling.check_is_used()
    sampling.check_has_room('max_new_tokens', self.max_new_tokens)
    return sampling


def check_count(name: str, value: int) -> None:
  """Raises ValueError unless `value` is an integer of at least 1."""
  if type(value) is not int or value < 1:
    raise ValueError(f'{name} should be a positive integer, got {value!r}')


def check_seed(seed: int) -> None:
  """Raises ValueError unless `seed` is an integer from 0 to 2**32 - 1."""
  if type(seed) is not int or not 0 <= seed < 2**32:
    raise ValueError(
      f'seed should be an integer from 0 to 2**32 - 1, got {seed!r}'
    )


@jax.jit
def row_keys(seeds: Array, streams: Array) -> Array:
  """Makes keys `[B]` from seeds and the numbers of streams, `[B]`."""
  of_row = lambda seed, i: keys.row_keys(jax.random.key(seed), i[None])[0]
  return jax.vmap(of_row)(seeds, streams)


def decoder_for(decoder: Decoder, batch: Batch) -> Decoder:
  """Returns `decoder.sampled` if the batch says how each row is sampled."""
  return decoder if batch.prompt.sampling is None else decoder.sampled


def has_room(
  decoder: Decoder, batch: Batch, max_new_tokens: int, gamma: int
) -> bool:
  """Tells whether a network that only drafts has positions for such texts."""
  needed = batch.prompt.decoder_tokens.shape[1] + max_new_tokens
  return not gamma or needed + gamma - 1 <= decoder.max_drafted


def max_length(decoder: Decoder, batch: Batch, max_new_tokens: int) -> int:
  """Returns `max_len` for batches of one shape, with room to spare: a row's own
  limit is data, and another one soon finds its program compiled. ValueError if
  the drafter has no room for them."""
  gamma = decoder.drafter.gamma
  if not has_room(decoder, batch, max_new_tokens, gamma):
    raise ValueError(
      f'the drafter has {decoder.max_drafted} positions, too few for '
      f'max_new_tokens {max_new_tokens} with gamma {gamma}: lower one of them'
    )
  # After prompts of up to 64 tokens, 1 to 128 new ones have room for 192 in
  # all, unless a drafter's table of positions ends before.
  needed = batch.prompt.decoder_tokens.shape[1] + max_new_tokens
  roomy = needed + -max_new_tokens % _ROOM
  return max(needed, min(roomy, decoder.max_drafted - gamma))


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

  The decoder keeps what was compiled: it depends on no setting of a text.
  Raises ValueError if its gamma is yet to be measured, or `exact_bits` cannot
  be kept.
  """
  decoder = decoder_for(decoder, first)
  if decoder.is_auto:
    raise ValueError('gamma auto is not measured here: give a number')
  num_devices = settings.num_devices
  params = place(decoder.params, num_devices, is_batch=False)
  # `parts` is a function of a module, so that it is a key: a lambda, made anew
  # at each call, would be compiled each time.
  shapes = str(jax.tree.map(lambda leaf: leaf.shape, first.prompt))
  max_len = max_length(decoder, first, settings.most_new_tokens)
  key = ProgramKey(decoder.recipe, parts, shapes, max_len, num_devices)
  # Weights are arguments: programs serve any weights of these shapes.
  if key not in decoder.programs:
    rng_key, prompt = placed(first, settings)
    if decoder.recipe.exact_bits:
      settings.call(
        lambda: exact_bits.check(
          decoder.method, params.target, prompt, max_len=max_len
        )
      )
    program = Program(
      method=decoder.method,
      params=params,
      prompt=prompt,
      rng_key=rng_key,
      max_len=max_len,
      places=sharding(num_devices, is_batch=True),
    )
    decoder.programs[key] = settings.call(lambda: _together(parts(program)))
  return params, decoder.programs[key]


def _together(parts: Sequence[Part]) -> Sequence[jax.stages.Compiled]:
  """Compiles parts; while one is compiled, or read, the next is traced."""
  with concurrent.futures.ThreadPoolExecutor(len(parts)) as pool:
    futures = [pool.submit(part.lower().compile) for part in parts]
    return [future.result() for future in futures]


def placed(batch: Batch, settings: DecodeSettings) -> tuple[Array, Prompt]:
  """Puts keys of rows, and prompts, on the devices that share a batch."""
  keys_of_rows = batch.keys
  if keys_of_rows is None:
    ids = batch.prompt.row_ids
    seeds = np.full(ids.shape, settings.seed, np.uint32)
    keys_of_rows = row_keys(seeds, ids)
  rows = keys_of_rows, batch.prompt
  return place(rows, settings.num_devices, is_batch=True)


def compile_decode(
  decoder: Decoder, first: Batch, settings: DecodeSettings
) -> Decode:
  """Compiles the decoding of batches of the shape of `first`: the host sees
  each iteration if that is shown or may complete a stop string, otherwise the
  last."""
  params, (prefill, *loop) = compiled(decoder, first, settings, parts)

  def to_the_end(batch: Batch) -> DecodeOutput:
    state = prefill(params, *placed(batch, settings))
    return jax.block_until_ready(loop[0](params, state, ALL)[1])

  def decode(batch: Batch, shows: Sequence[Show]) -> DecodeOutput:
    if not (shows or any(batch.stops)):
      return settings.call(lambda: to_the_end(batch))
    state = prefill(params, *placed(batch, settings))
    steps = iterations(decoder, params, loop, state, batch, shows=shows)
    while True:
      try:
        next(steps)
      except StopIteration as end:
        return end.value

  return decode


def parts(program: Program) -> Sequence[Part]:
  """Returns the parts that decode a batch: whole, or step by step."""
  return [program.prefill, *program.stepwise(step_values.gather)]


def iterations(
  decoder: Decoder,
  params: Params,
  programs: Sequence[jax.stages.Compiled],
  state: DecodeState,
  batch: Batch,
  *,
  shows: Sequence[Show] = (),
  keep: Callable[[DecodeState], None] = lambda state: None,
) -> Iterations:
  """Iterates from the state after a prefill, by the programs of
  `Program.stepwise`; `shows` get each record at once, and `keep` each state
  that follows."""
  iterate, truncate = programs
  # Records of one iteration need the text that came before it.
  traced = recording.init(batch.prompt)
  find_ends = stop_strings.watch(decoder.vocabulary, batch.stops)
  while not np.asarray(state.done).all():
    # Copied, as the loop overwrites the state it is given.
    before = jax.tree.map(np.array, state.statistics)
    state, _, values = iterate(params, state, _ONE)
    keep(state)
    values = jax.device_get(values)
    counts, has_ended = find_ends(values)
    if has_ended.any():
      decision = values.draft, values.verification
      state = truncate(state, before, *decision, counts, has_ended)
      keep(state)
      values = dataclasses.replace(values, counts=counts)
    records, traced = recording.iteration_records(
      values, traced, decoder.vocabulary.pieces
    )
    for record, show in itertools.product(records, shows):
      show(record)
    yield records
  state, output, _ = iterate(params, state, _NONE)
  keep(state)
  return output
