"""Shows where the time of a plain step goes on this device.

    python -m experiments.plain_step

It makes three tables: the operations of plain decoding, by the profiler; matrix
products of the model's shapes by themselves, with kernels as stored, transposed
and in tiles; and the time that each logit processor adds to a step.
"""

import argparse
import collections
import dataclasses
import functools
import gzip
import json
import re
import sys
import tempfile
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from experiments import common, report
from experiments.report import Cells, Table
from specdec_jax.assembly import decoder as decoder_lib
from specdec_jax.assembly import packing, running
from specdec_jax.assembly.decoder import Decoder
from specdec_jax.assembly.drafters import NoDrafter
from specdec_jax.assembly.models import Model
from specdec_jax.base import Context, Prompt
from specdec_jax.drafters.always_full import always_full
from specdec_jax.measure import loops, stopwatch
from specdec_jax.models import presets
from specdec_jax.models.products import by_rows, by_tiles, tiled
from specdec_jax.sampling.processors import after_drafts

MODULE = 'experiments.plain_step'
_PROMPT = 'Explain how a refrigerator keeps food cold.'
# Of which shapes are told apart.
_PRODUCT = 'dot'
# What the third table turns on, one by one.
_PROCESSORS: dict[str, dict[str, Any]] = {
  'repetition_penalty': {'repetition_penalty': 1.2},
  'presence_penalty': {'presence_penalty': 0.5},
  'frequency_penalty': {'frequency_penalty': 0.2},
  'no_repeat_ngram_size': {'no_repeat_ngram_size': 3},
  'encoder_repetition_penalty': {'encoder_repetition_penalty': 1.2},
  'encoder_no_repeat_ngram_size': {'encoder_no_repeat_ngram_size': 3},
  'min_new_tokens': {'min_new_tokens': 1},
  'logit_bias': {'logit_bias': dict.fromkeys(range(100, 108), -1.0)},
  'sequence_bias': {'sequence_bias': [[[10, 11, i], 2.0] for i in range(8)]},
  'suppress_tokens': {'suppress_tokens': [*range(100, 108)]},
  'bad_words_ids': {'bad_words_ids': [[10, i] for i in range(8)]},
  'forced_eos_token_id': {'forced_eos_token_id': 0},
}
_GAMMA = 8
# What is read from memory at least, so that no cache holds it all.
_NUM_BYTES = 2e8
# Of activations: plain decoding, and scoring 1, 3, 4 and 8 drafted tokens.
_NUM_ROWS = 1, 2, 4, 5, 9
# How a kernel is stored, and rows are multiplied by it, by column.
_PRODUCTS: dict[str, tuple[Any, Any]] = {
  'microseconds': (
    lambda kernel: kernel,
    lambda rows, kernel: jnp.tensordot(
      rows, kernel, 1, preferred_element_type=jnp.float32
    ),
  ),
  'by rows': (lambda kernel: kernel.T, by_rows),
  'by tiles': (tiled, by_tiles),
}


def main(argv: Sequence[str] | None = None) -> int:
  argv = sys.argv[1:] if argv is None else argv
  args = _parser().parse_args(argv)
  return common.finish('plain_step', lambda: _run(args, argv))


def _run(args: argparse.Namespace, argv: Sequence[str]) -> None:
  model = Model(checkpoint=args.model, dtype=args.dtype)
  decoder = decoder_lib.build(model, drafter=NoDrafter())
  counts = args.max_new_tokens, args.repeats
  tables = {
    'operations': (
      'operations of a plain step',
      functools.partial(operations, decoder, *counts),
    ),
    'products': (
      'matrix products by themselves',
      functools.partial(products, decoder, args.repeats),
    ),
    'processors': (
      'what processors of logits add to a step',
      functools.partial(processors, decoder, *counts),
    ),
  }
  for table in args.tables:
    title, measured = tables[table]
    report.measure(
      (MODULE, argv),
      Path(args.output),
      f'{table}_{args.dtype}',
      f'{args.model}, {args.dtype}: {title}',
      measured,
    )


def operations(decoder: Decoder, num_new: int, repeats: int) -> Table:
  """What the profiler sees in a plain decode, by kind and shape."""
  settings = running.DecodeSettings(max_new_tokens=num_new)
  [batch] = packing.pack(decoder, [_PROMPT], settings)
  loop = loops.plain_loop(
    decoder.params,
    jax.random.key(0),
    [batch.prompt],
    method=dataclasses.replace(decoder.method, eos_id=(-1,)),
    max_len=running.max_length(decoder, batch, num_new),
  )
  seconds, _ = stopwatch.alternate({'plain': loop.decode}, repeats)
  with tempfile.TemporaryDirectory() as folder:
    with jax.profiler.trace(folder):
      jax.block_until_ready(loop.decode())
    [path] = Path(folder).rglob('*.trace.json.gz')
    events = json.loads(gzip.decompress(path.read_bytes()))['traceEvents']
  step = float(np.median(seconds['plain'])) / num_new
  rows = summed(events, loop.run.as_text(), num_new)
  return Table(
    rows=rows,
    notes=[
      f'{num_new / float(np.median(seconds["plain"])):.1f} tokens/s, '
      f'{1e3 * step:.1f} ms per step without the profiler, the median of '
      f'{repeats}. Operations that take less than a hundredth of the listed '
      'time are left out. GB/s are of the second operand, the weights.',
    ],
  )


def summed(
  events: Iterable[dict[str, Any]], hlo: str, num_steps: int
) -> list[Cells]:
  """A row for each kind of operation, the longest first.

  Args:
    events: of a trace.
    hlo: the compiled program, which names the operations and their shapes.
    num_steps: steps in the trace.
  """
  results = dict(re.findall(r'%?([\w.\-]+) = (\w+\[[\d,]*\])', hlo))
  operands = dict(
    re.findall(rf'%?({_PRODUCT}[\w.\-]*) = \S+ {_PRODUCT}\(([^)]*)\)', hlo)
  )
  seconds: collections.Counter[tuple[str, str]] = collections.Counter()
  counts: collections.Counter[tuple[str, str]] = collections.Counter()
  for event in events:
    if event.get('ph') != 'X' or event['name'] not in results:
      continue
    kind = re.sub(r'[.\d]+$', '', event['name'])
    shape = ''
    if inputs := operands.get(event['name']):
      names = re.findall(r'%([\w.\-]+)', inputs)
      shape = ' by '.join(results[each] for each in names)
    seconds[kind, shape] += event['dur'] * 1e-6
    counts[kind, shape] += 1
  total = sum(seconds.values())
  return [
    {
      'operation': kind,
      'shapes': re.sub(r'\w+\[([\d,]*)\]', r'\1', shape),
      'per step': f'{counts[kind, shape] / num_steps:.0f}',
      'ms per step': f'{1e3 * spent / num_steps:.2f}',
      'share': f'{spent / total:.0%}',
      'GB/s': _rate(shape, spent / counts[kind, shape]),
    }
    for (kind, shape), spent in seconds.most_common()
    if spent > total / 100
  ]


def _rate(shape: str, seconds: float) -> str:
  """How fast the weights of a product are read, empty without them."""
  # Of 'f32[576,1] by bf16[576,3072]': 16 bits, 576 by 3072.
  weights = re.search(r'(\d+)\w*\[([\d,]+)\]$', shape)
  if not weights:
    return ''
  num_weights = np.prod([int(size) for size in weights[2].split(',')])
  return f'{int(weights[1]) / 8 * float(num_weights) / seconds / 1e9:.1f}'


def products(decoder: Decoder, repeats: int) -> Table:
  """Products of a few rows by kernels of the model's shapes."""
  shapes = collections.Counter(
    leaf.shape
    for path, leaf in jax.tree.leaves_with_path(decoder.params.target)
    if path[-1].key == 'kernel'
  )
  layered = [shape for shape, count in shapes.items() if count > 1]
  dtype = jnp.dtype(decoder.model.dtype)
  programs = {
    (shape, num_rows, name): _product(shape, num_rows, dtype, *functions)
    for shape in sorted(layered)
    for num_rows in _NUM_ROWS
    for name, functions in _PRODUCTS.items()
    if name != 'by tiles' or (dtype == jnp.float32 and shape[1] % 64 == 0)
  }
  seconds, _ = stopwatch.alternate(
    {key: call for key, (call, _) in programs.items()}, repeats
  )
  microseconds = lambda *key: (
    f'{1e6 * float(np.median(seconds[key])) / programs[key][1]:.0f}'
    if key in programs
    else ''
  )
  return Table(
    rows=[
      {
        'kernel': ' by '.join(map(str, shape)),
        'rows': num_rows,
        **{name: microseconds(shape, num_rows, name) for name in _PRODUCTS},
      }
      for shape in sorted(layered)
      for num_rows in _NUM_ROWS
    ],
    notes=['Many kernels of a shape one after the other, none in the caches.'],
  )


def processors(decoder: Decoder, num_new: int, repeats: int) -> Table:
  """Steps with each processor on, in turns with steps of a program without any:
  of plain decoding, and such as score a draft."""
  ways = {**_PROCESSORS, 'all of them': {}, 'none, in their program': {}}
  for each in _PROCESSORS.values():
    ways['all of them'] = {**ways['all of them'], **each}
  settings = running.DecodeSettings(max_new_tokens=num_new)
  own = dataclasses.replace(settings, texts=[*ways.values()])
  [off] = packing.pack(decoder, [_PROMPT], settings)
  on = packing.pack(decoder, [_PROMPT] * len(ways), own)
  method = dataclasses.replace(decoder.method, eos_id=(-1,))
  drafter = always_full(_GAMMA)
  columns = {
    'plain': (loops.plain_loop, method),
    f'{_GAMMA} drafted': (
      loops.speculative_loop,
      dataclasses.replace(method, drafter=drafter),
    ),
  }
  rows: dict[str, Cells] = {name: {'on': name} for name in ('none', *ways)}
  alone = _alone([x.prompt for x in on], decoder.target.vocab_size, num_new)
  by_themselves, _ = stopwatch.alternate(
    dict(zip(ways, alone, strict=True)), 10 * repeats
  )
  for column, (make, method) in columns.items():
    loop = functools.partial(
      make,
      decoder.params,
      jax.random.key(0),
      method=method,
      max_len=running.max_length(decoder, off, num_new),
    )
    without, within = loop([off.prompt]), loop([x.prompt for x in on])
    states = without.states[0], *within.states
    runs = without.run, *[within.run] * len(ways)
    seconds, ended = stopwatch.alternate(
      {
        name: functools.partial(run, decoder.params, state)
        for name, run, state in zip(rows, runs, states, strict=True)
      },
      repeats,
    )
    steps = {
      name: seconds[name] / int(ended[name].statistics.num_target_runs[0])
      for name in rows
    }
    for name, row in rows.items():
      pairs = steps[name] / steps['none'] - 1
      row[f'{column}, ms'] = f'{1e3 * np.median(steps[name]):.2f}'
      row[f'{column}, more'] = f'{np.median(pairs):+.1%}'
  rows['none']['by themselves, ms'] = ''
  for name, spent in by_themselves.items():
    rows[name]['by themselves, ms'] = f'{1e3 * np.median(spent):.2f}'
  return Table(
    rows=[*rows.values()],
    notes=[
      f'{num_new} new tokens, batch 1, medians of {repeats} turns; "more" is '
      'the median of the pairs of a turn. One program serves all rows but the '
      f'first, with room for all of the biases. "By themselves" they process '
      f'logits of {_GAMMA + 1} positions, medians of {10 * repeats} turns.',
    ],
  )


def _alone(
  prompts: Sequence[Prompt], vocab_size: int, num_new: int
) -> list[Callable[[], Any]]:
  """Calls that process the logits of a block, and do nothing else."""
  shape = 1, _GAMMA + 1, vocab_size
  logits = jax.random.normal(jax.random.key(0), shape)
  drafted = jax.random.randint(jax.random.key(1), (1, _GAMMA), 0, vocab_size)

  @jax.jit
  def process(prompt: Prompt) -> jax.Array:
    tokens = jnp.pad(prompt.decoder_tokens, ((0, 0), (0, num_new)))
    text = Context(
      tokens=tokens,
      lengths=prompt.decoder_lengths + num_new // 2,
      processors=prompt.processors,
      starts=prompt.decoder_lengths,
    )
    return after_drafts(logits, text, drafted)

  return [functools.partial(process, prompt) for prompt in prompts]


def _product(
  shape: tuple[int, int], num_rows: int, dtype: Any, stored: Any, multiply: Any
) -> tuple[Any, int]:
  """A compiled loop of products, and how many it makes."""
  num_kernels = int(_NUM_BYTES / np.prod(shape) / dtype.itemsize)
  key, scale = jax.random.key(0), jnp.asarray(shape[0] ** -0.5, dtype)
  kernels = [
    stored(jax.random.normal(each, shape, dtype) * scale)
    for each in jax.random.split(key, num_kernels)
  ]

  def run(rows: jax.Array, kernels: Sequence[jax.Array]) -> jax.Array:
    for kernel in kernels:
      # The next product waits for this one.
      made = multiply(rows, kernel)
      rows = rows + (1e-9 * made[:, :1]).astype(dtype)
    return rows

  rows = jnp.ones((num_rows, shape[0]), dtype)
  compiled = jax.jit(run).lower(rows, kernels).compile()
  return functools.partial(compiled, rows, kernels), num_kernels


def _parser() -> argparse.ArgumentParser:
  parser = argparse.ArgumentParser(
    prog=f'python -m {MODULE}', description=__doc__.splitlines()[0]
  )
  parser.add_argument('--model', default='smollm2-135m')
  parser.add_argument('--dtype', choices=presets.DTYPES, default='float32')
  parser.add_argument('--output', default='experiments/plain_step/results')
  common.add_tables(parser, ('operations', 'products', 'processors'))
  common.add_counts(parser, max_new_tokens=64, repeats=5)
  return parser


if __name__ == '__main__':
  sys.exit(main())
