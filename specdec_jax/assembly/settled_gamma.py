"""The gamma of a decoder to which none is given.

It is the one that was measured to be fastest on this machine, else 0, which is
plain decoding. Every `Auto` becomes a number here: for batches (`settled`), for
the jobs of `infer` (`choose`), and where nothing is measured (`unmeasured`).
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax

from specdec_jax import lazy
from specdec_jax.assembly import gamma_memory, running
from specdec_jax.assembly.decoder import Decoder
from specdec_jax.assembly.gamma_memory import RememberedGamma
from specdec_jax.launch import platforms
from specdec_jax.text.prompts import Batch

# Rows that are decoded to measure gamma before a job.
NUM_MEASURED_ROWS = 128
UNKNOWN = (
  'plain decoding: no gamma was measured on this machine for this model, '
  'drafter, dtype and batch size; `specdec bench` with the same options '
  'measures it, and so does measure_gamma before a job'
)
_MEASURE = 'specdec_jax.measure.gamma_search:measure'


def place(decoder: Decoder, num_rows: int, num_devices: int) -> dict[str, str]:
  """Returns what a choice depends on: machine, models, batch and drafter.

  The same entry serves batches that wait for their slowest row, rows that are
  refilled, and streams.
  """
  # What is fastest for one row is not for 32; 5 to 8 rows share a choice.
  without_gamma = dataclasses.replace(  # type: ignore[type-var]
    decoder.recipe.drafter,
    gamma=None,
  )
  return {
    'device': f'{num_devices} x {platforms.device_name()}',
    'jax': jax.__version__,
    'target': str(decoder.model),
    'drafter': str(without_gamma),
    'rows': f'up to {1 << (num_rows - 1).bit_length()}',
    'sampling': 'greedy' if decoder.sampling.is_greedy else 'sampled',
  }


class SettledGamma(NamedTuple):
  """A gamma that was not given, and how it was chosen, in a sentence."""

  gamma: int
  sentence: str


def remembered(
  decoder: Decoder, num_rows: int, num_devices: int
) -> RememberedGamma | None:
  """Returns what was measured for batches of this size: by this process, else
  by earlier ones."""
  key = num_rows, num_devices
  if key not in decoder.gammas:
    recalled = gamma_memory.recall(place(decoder, *key))
    if recalled is not None:
      decoder.gammas[key] = recalled
  return decoder.gammas.get(key)


def choose(
  decoder: Decoder,
  *,
  num_rows: int,
  num_devices: int,
  has_room: Callable[[int], bool],
) -> SettledGamma:
  """Returns the remembered gamma, else 0.

  `has_room` says of a gamma whether the drafter has positions for the texts:
  one that was measured for shorter texts is ignored.
  """
  choice = remembered(decoder, num_rows, num_devices)
  if choice is None or not has_room(choice.gamma):
    return SettledGamma(0, UNKNOWN)
  return SettledGamma(choice.gamma, choice.sentence)


def settled(
  decoder: Decoder,
  batch: Batch,
  settings: running.DecodeSettings,
  notify: Callable[[str], None] = lambda sentence: None,
) -> Decoder:
  """Returns the decoder for batches like this one, with a number as its gamma:
  the given one, else the remembered one, else 0.

  `notify` gets a sentence on a gamma that was not given.
  """
  decoder = running.decoder_for(decoder, batch)
  if not decoder.is_auto:
    return decoder
  choice = choose(
    decoder,
    num_rows=settings.num_rows,
    num_devices=settings.num_devices,
    has_room=lambda gamma: running.has_room(
      decoder, batch, settings.most_new_tokens, gamma
    ),
  )
  notify(choice.sentence)
  return decoder.at(choice.gamma)


def unmeasured(decoder: Decoder, *, drafts: bool) -> Decoder:
  """Returns the decoder for what no measurement is of, such as beam search:
  with its usual gamma if it `drafts`, else with 0.

  A gamma that is given stays, and so does 'auto' if it was given by name.
  """
  auto = decoder.auto
  if auto is None or auto.usual is None:
    return decoder
  return decoder.at(auto.usual if drafts else 0)


def measured(
  decoder: Decoder,
  batches: Sequence[Batch],
  settings: running.DecodeSettings,
) -> None:
  """Measures gamma on the first rows of a job, and remembers it.

  Nothing happens if gamma is given. ValueError without the extra `measure`.
  """
  decoder = running.decoder_for(decoder, batches[0])
  if not decoder.is_auto:
    return
  num_batches = max(1, NUM_MEASURED_ROWS // settings.num_rows)
  measure = measurement(_MEASURE)
  measure(decoder, batches[:num_batches], settings, source='measure_gamma')


def measurement(path: str) -> Callable[..., Any]:
  """Imports `'module:function'` of the extra `measure`; ValueError if the extra
  is not installed."""
  module = path.partition(':')[0]
  if not lazy.is_installed(module):
    raise ValueError(
      'measure_gamma needs the extra measure, whose folder is not in this '
      'installation'
    )
  return lazy.attribute(path)
