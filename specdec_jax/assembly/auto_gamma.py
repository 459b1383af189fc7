"""`gamma='auto'` for batches that are all there: in Python and in `bench`."""

import dataclasses
import functools
import logging
from collections.abc import Callable, Iterator, Sequence

from specdec_jax.assembly import running
from specdec_jax.assembly.decoder import Decoder
from specdec_jax.decoding.program import Part, Program
from specdec_jax.decoding.state import DecodeOutput
from specdec_jax.measure import stopwatch, trials
from specdec_jax.text.prompts import Batch
from specdec_jax.theory import gamma_trials

# Tokens of the decode that warms programs up.
_NUM_WARM = 4
_log = logging.getLogger('specdec_jax')


def settled(decoder: Decoder, settings: running.DecodeSettings) -> Decoder:
  """Returns a decoder whose gamma is a number: itself, or what was measured.

  Raises ValueError if nothing was measured for batches of that size.
  """
  if not decoder.is_auto:
    return decoder
  choice = decoder.gammas.get((settings.num_rows, settings.num_devices))
  if choice is None:
    raise ValueError(
      'gamma auto is measured where many texts are decoded whole, without '
      f'stop, and nothing was yet for batches of {settings.batch_size}: give '
      'a number'
    )
  return decoder.at(choice.gamma)


def outputs(
  decoder: Decoder, batches: Sequence[Batch], settings: running.DecodeSettings
) -> Iterator[DecodeOutput]:
  """Decodes batches with the gamma that the first, or earlier ones, chose."""
  choice, first = choose(decoder, batches, settings)
  yield from first
  rest = batches[len(first) :]
  if rest:
    decode = compile_parts(decoder.at(choice.gamma), rest[0], settings)
    yield from (decode(batch)[0] for batch in rest)


def choose(
  decoder: Decoder, batches: Sequence[Batch], settings: running.DecodeSettings
) -> tuple[gamma_trials.ChosenGamma, list[DecodeOutput]]:
  """Chooses the gamma for batches of one shape, which the decoder then keeps.

  Also returns the outputs of the batches that were decoded to find it: none if
  there are too few, or if the gamma is known.
  """
  batch_size = batches[0].prompt.row_ids.size
  # What is fastest for one row is not for 32.
  key = (batch_size, settings.num_devices)
  if key in decoder.gammas:
    return decoder.gammas[key], []
  gammas = decoder.tried_gammas
  # Which gamma decodes which batch, such as 0, 3, 11, 23, 23, 11, 3, 0: neither
  # clock nor chance has a say, so that a second run decodes the same.
  turns = trials.schedule(gammas, batch_size, len(batches))
  if not turns:
    choice = trials.too_short(gammas, len(batches))
    _log.info(choice.sentence)
    return choice, []
  # All are compiled and warm before the first is timed.
  decoders = {
    gamma: compile_parts(decoder.at(gamma), batches[0], settings)
    for gamma in gammas
  }
  visits: dict[int, list[trials.Visit]] = {gamma: [] for gamma in gammas}
  found = []
  # These are the first batches of the user's own: their outputs are kept.
  for gamma, batch in zip(turns, batches, strict=False):
    output, visit = settings.call(functools.partial(decoders[gamma], batch))
    visits[gamma].append(visit)
    found.append(output)
  choice = gamma_trials.choose(
    [trials.trial(each, waits=True) for each in visits.values()], batch_size
  )
  decoder.gammas[key] = choice
  _log.info(choice.sentence)
  return choice, found


def compile_parts(
  decoder: Decoder, first: Batch, settings: running.DecodeSettings
) -> Callable[[Batch], tuple[DecodeOutput, trials.Visit]]:
  """Compiles prefill and loop for such batches, and warms them up."""
  params, [prefill, loop] = running.compiled(decoder, first, settings, _parts)

  def decode(batch: Batch) -> tuple[DecodeOutput, trials.Visit]:
    key, prompt = running.placed(batch, settings)
    state, fill_seconds = stopwatch.run_seconds(prefill, params, key, prompt)
    output, loop_seconds = stopwatch.run_seconds(loop, params, state)
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


def _parts(program: Program) -> Sequence[Part]:
  # Apart, since only the loop's seconds depend on gamma.
  return [program.prefill, program.finish]
