"""Acceptance of drafts in few bits, and steps on this device."""

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from experiments import report
from experiments.quantized.quality import names_of, plain_decoder
from experiments.report import Cells, Table
from specdec_jax.assembly import decoder as decoder_lib
from specdec_jax.assembly import packing, running
from specdec_jax.assembly.drafters import NoDrafter, Quantized
from specdec_jax.assembly.lengths import Fixed
from specdec_jax.assembly.models import Model
from specdec_jax.assembly.text_settings import TextSettings
from specdec_jax.base import Params
from specdec_jax.drafters.always_full import always_full
from specdec_jax.measure import calibration, loops, stopwatch
from specdec_jax.models import families

# Of these, on a CPU.
_TIMED = (
  *(('float32', None), ('float32', 'int8'), ('float32', 'int4:32')),
  *(('bfloat16', None), ('bfloat16', 'int8')),
)
# Bits, group and layers of drafters.
DRAFTERS: tuple[dict[str, Any], ...] = (
  *({'bits': bits} for bits in (8, 4, 3)),
  *({'bits': bits, 'group': 32} for bits in (4, 3)),
  *({'bits': bits, 'layers': 2 / 3} for bits in (8, 4)),
)


def acceptance(targets: Sequence[str], num_new: int) -> Table:
  """How often targets in float32 accept their own guesses in few bits."""
  rows = []
  for name in targets:
    for temperature in (0.0, 1.0):
      rows += _accepted(name, temperature, num_new)
  return Table(
    rows=rows,
    notes=[
      "Targets in float32. Greedy alpha is the share of the target's own "
      'greedy tokens that the drafter finds likeliest; at temperature 1 it is '
      'the mean of sum min(p, q) along text that the target draws. Prompts are '
      'chat.jsonl and short.jsonl of experiments/prompts, with '
      f'{num_new} new tokens each; layers are evenly spread.'
    ],
  )


def _choices(num_layers: int) -> dict[str, Quantized]:
  """The drafters of the table, by what they are called."""
  found = {}
  for options in DRAFTERS:
    kept = options.get('layers', 1) * num_layers
    own = {**options, 'layers': round(kept)}
    label = f'{own["bits"]} bits'
    label += f' by {own["group"]}' if 'group' in own else ''
    label += f', {own["layers"]} of {num_layers} layers'
    found[label] = Quantized(**own)
  return found


def _accepted(name: str, temperature: float, num_new: int) -> list[Cells]:
  decoder = decoder_lib.build(
    Model(checkpoint=name, dtype='float32'),
    drafter=NoDrafter(),
    sampling=TextSettings(temperature=temperature),
  )
  choices = _choices(families.num_layers(decoder.config)[-1])
  made = [
    each.make(decoder.parts.target_info, Fixed(1)) for each in choices.values()
  ]
  target = decoder.params.target
  is_chat = name.startswith('smollm2')
  path = Path('experiments/prompts') / (
    'chat.jsonl' if is_chat else 'short.jsonl'
  )
  texts = [json.loads(line)['prompt'] for line in path.read_text().splitlines()]
  settings = running.DecodeSettings(
    max_new_tokens=num_new, chat=is_chat, batch_size=12
  )
  batches = packing.pack(decoder, texts, settings)
  found = calibration.overlaps(
    Params(target, [each.join(target, ()) for each in made]),
    jax.random.key(0),
    [batch.prompt for batch in batches],
    method=decoder.method,
    drafters=[each.drafter for each in made],
    max_len=running.max_length(decoder, batches[0], num_new),
    num_tokens=num_new,
  )
  rows = []
  for label, [overlaps] in zip(choices, found, strict=True):
    figures = calibration.acceptance(overlaps, max_gamma=4)
    rows.append(
      {
        'target': name,
        'drafter': label,
        'temperature': f'{temperature:g}',
        'alpha': f'{figures["alpha"]:.3f}',
        '95%': report.interval(figures['alpha_interval']),
        'tokens': figures['num_prefixes'],
      }
    )
  return rows


def steps(targets: Sequence[str], num_new: int, repeats: int) -> Table:
  """Plain and verify steps on this device by weights."""
  rows = []
  for name in targets:
    decoders = {
      (dtype, weights): plain_decoder(name, dtype, weights)
      for dtype, weights in _TIMED
    }
    programs: dict[Any, Any] = {}
    for key, decoder in decoders.items():
      settings = running.DecodeSettings(max_new_tokens=num_new)
      text = 'The package contains a small program that shows the time.'
      [batch] = packing.pack(decoder, [text], settings)
      method = dataclasses.replace(decoder.method, eos_id=(-1,))
      length = running.max_length(decoder, batch, num_new)
      args = decoder.params, jax.random.key(0), [batch.prompt]
      for width in (1, 5):
        full = always_full(width - 1)
        loop = loops.speculative_loop(
          *args,
          method=dataclasses.replace(method, drafter=full),
          max_len=length,
        )
        programs[(*key, width)] = loop
    seconds, states = stopwatch.alternate(
      {key: loop.decode for key, loop in programs.items()}, repeats
    )
    for key, decoder in decoders.items():
      each = {}
      for width in (1, 5):
        [state] = states[(*key, width)]
        runs = int(state.statistics.num_target_runs.max())
        each[width] = 1e3 * float(np.median(seconds[(*key, width)])) / runs
      rows.append(
        {'target': name}
        | names_of(decoder)
        | {
          'T(1), ms': f'{each[1]:.2f}',
          'T(5), ms': f'{each[5]:.2f}',
        }
      )
  return Table(
    rows=rows,
    notes=[
      f'Batch 1, {num_new} new tokens, medians of {repeats} decodes in turns. '
      'T(w) is an iteration that scores w positions.'
    ],
  )
