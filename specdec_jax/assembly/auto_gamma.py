"""`gamma='auto'`, the default: what is remembered of a decoder on this machine,
or is measured on the first texts of many."""

import dataclasses
import functools
import itertools
import logging
import time
from collections.abc import Callable, Iterator, Sequence

import jax

from specdec_jax.assembly import running
from specdec_jax.assembly.decoder import Decoder
from specdec_jax.decoding.state import DecodeOutput
from specdec_jax.launch import progress
from specdec_jax.measure import stopwatch, trials
from specdec_jax.text.prompts import Batch
from specdec_jax.theory.gamma_trials import ChosenGamma

# The decode that warms programs up makes so many tokens.
_NUM_WARM = 4
_log = logging.getLogger('specdec_jax')


def where(
  decoder: Decoder, num_rows: int, num_devices: int, loop: str = 'whole'
) -> dict[str, str]:
  """Returns what a choice depends on: what is fastest for one row is not for
  32. `loop` is how rows are decoded."""
  # 5 to 8 rows share a choice: they are 'up to 8'.
  any_gamma = dataclasses.replace(decoder.choice, gamma=None)  # type: ignore
  return {
    'device': f'{num_devices} x {stopwatch.device_name()}',
    'jax': jax.__version__,
    'target': str(decoder.model),
    'drafter': str(any_gamma),
    'rows': f'up to {1 << (num_rows - 1).bit_length()}',
    'sampling': 'greedy' if decoder.sampling.is_greedy else 'sampled',
    'loop': loop,
  }


def keep(place: dict[str, str], choice: ChosenGamma) -> None:
  """Remembers a choice for later runs, if it was measured."""
  if choice.tokens_per_second:
    rested = dataclasses.replace(choice, turns=(), turn_examples=0)
    trials.remember(place, rested)


def known(
  decoder: Decoder, batch: Batch, settings: running.DecodeSettings
) -> ChosenGamma | None:
  """Returns what was chosen for batches of that size, also by earlier runs, if
  it has room for them."""
  key = settings.num_rows, settings.num_devices
  if key not in decoder.gammas and (
    found := trials.recall(where(decoder, *key))
  ):
    decoder.gammas[key] = found
  choice, num_new = decoder.gammas.get(key), settings.most_new_tokens
  if choice and running.has_room(decoder, batch, num_new, choice.gamma):
    return choice
  return None


def settled(
  decoder: Decoder,
  batch: Batch,
  settings: running.DecodeSettings,
  say: Callable[[str], None] = _log.info,
) -> Decoder:
  """Returns the decoder for such batches, with a gamma that is a number: its
  own, or the known one, or 0 if none is known. `say` gets a sentence on the
  choice."""
  decoder = running.decoder_for(decoder, batch)
  if not decoder.is_auto:
    return decoder
  choice = known(decoder, batch, settings) or trials.unmeasured()
  say(choice.sentence)
  return decoder.at(choice.gamma)


def _tried(
  decoder: Decoder, batch: Batch, settings: running.DecodeSettings
) -> tuple[int, ...]:
  """Returns the gammas to try that have room for such batches."""
  has_room = functools.partial(
    running.has_room, decoder, batch, settings.most_new_tokens
  )
  return tuple(filter(has_room, decoder.tried_gammas))


def outputs(
  decoder: Decoder, batches: Sequence[Batch], settings: running.DecodeSettings
) -> Iterator[tuple[Decoder, DecodeOutput]]:
  """Decodes batches, each with the decoder of a given gamma, or of the one that
  the first batches, or earlier ones, chose; yields the output and that
  decoder."""
  size = trials.num_batches_of_turn(settings.num_rows)
  tried = _tried(decoder, batches[0], settings)
  first = size * trials.num_turns(tried)
  # What may stop at a string is decoded iteration by iteration.
  has_stops = any(any(batch.stops) for batch in batches)
  if len(tried) > 1 and len(batches) > first and not has_stops:
    choice, found = choose(decoder, batches, settings, is_worth_it=True)
    yield from found
    decoder, batches = decoder.at(choice.gamma), batches[len(found) :]
  else:
    decoder = settled(decoder, batches[0], settings)
  decode = running.compile_decode(decoder, batches[0], settings)
  yield from ((decoder, decode(batch, ())) for batch in batches)


def choose(
  decoder: Decoder,
  batches: Sequence[Batch],
  settings: running.DecodeSettings,
  *,
  is_worth_it: bool = False,
  title: str = '',
) -> tuple[ChosenGamma, list[tuple[Decoder, DecodeOutput]]]:
  """Chooses the gamma for batches of one shape, which the decoder then keeps.

  Also returns the outputs of the batches that were decoded to find it, each
  with its decoder. With `is_worth_it` a known choice is kept, and trials end
  where the batches are too few to repay them; otherwise all gammas are tried,
  on the same batches repeatedly if they are few, with a bar that has a `title`.
  """
  key = settings.num_rows, settings.num_devices
  found: list[tuple[Decoder, DecodeOutput]] = []
  size = trials.num_batches_of_turn(settings.num_rows)
  waiting = itertools.cycle(batches)
  decodes: dict[int, Callable] = {}
  tried = _tried(decoder, batches[0], settings)

  def decode(gamma: int) -> list[trials.Visit]:
    started = time.perf_counter()
    if gamma not in decodes:
      own = decoder.at(gamma)
      decodes[gamma] = compile_parts(own, batches[0], settings)
    compile_seconds, visits = time.perf_counter() - started, []
    # These are the first batches of the user's own: their outputs are kept.
    for batch in itertools.islice(waiting, size):
      output, visit = settings.call(functools.partial(decodes[gamma], batch))
      found.append((decoder.at(gamma), output))
      visits.append(visit)
    bar.advance(1)
    first = dataclasses.replace(visits[0], compile_seconds=compile_seconds)
    return [first, *visits[1:]]

  before = known(decoder, batches[0], settings) if is_worth_it else None
  num_turns = trials.num_turns(tried)
  with progress.bar(title, num_turns, is_shown=bool(title)) as bar:
    choice = trials.choose(
      tried,
      decode,
      batch_size=settings.num_rows,
      waits=True,
      known=before,
      is_worth=lambda num_turns: (
        not is_worth_it or num_turns * size <= len(batches) - len(found)
      ),
    )
  if before is not None or choice.tokens_per_second:
    decoder.gammas[key] = choice
  if before is None:
    keep(where(decoder, *key), choice)
  _log.info(choice.sentence)
  return choice, found


def compile_parts(
  decoder: Decoder, first: Batch, settings: running.DecodeSettings
) -> Callable[[Batch], tuple[DecodeOutput, trials.Visit]]:
  """Compiles prefill and loop for such batches, and warms them up."""
  params, [prefill, loop, _] = running.compiled(
    decoder, first, settings, running.parts
  )

  def decode(batch: Batch) -> tuple[DecodeOutput, trials.Visit]:
    key, prompt = running.placed(batch, settings)
    state, fill_seconds = stopwatch.run_seconds(prefill, params, key, prompt)
    (_, output, _), loop_seconds = stopwatch.run_seconds(
      loop, params, state, running.ALL
    )
    return output, trials.Visit(
      gamma=decoder.drafter.gamma,
      statistics=output.statistics,
      num_iterations=int(output.statistics.num_target_runs.max()),
      fill_seconds=fill_seconds,
      loop_seconds=loop_seconds,
    )

  # The first run of a program is slower: memory is laid out, caches are cold.
  most = first.prompt.decoder_lengths + _NUM_WARM
  prompt = dataclasses.replace(first.prompt, max_lengths=most)
  few = dataclasses.replace(first, prompt=prompt)
  settings.call(lambda: decode(few))
  return decode
