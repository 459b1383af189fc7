"""Measures packed weights, and quantised targets that draft for themselves.

    python -m experiments.quantized

The tables have the quality that few bits cost; how often a target in few bits
guesses the target's token; plain and verify steps on this device; bytes and
times of compiled TPU programs, and what speculation would gain. See README.md.
"""

import argparse
import dataclasses
import functools
import gettext
import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import specdec_jax
from experiments import common, report
from experiments.report import Cells, Table
from specdec_jax.assembly import decoder as decoder_lib
from specdec_jax.assembly import models, packing, running
from specdec_jax.assembly.decoder import Decoder
from specdec_jax.assembly.drafters import NoDrafter, Quantized
from specdec_jax.assembly.lengths import Fixed
from specdec_jax.assembly.models import Model
from specdec_jax.assembly.sampling import Sampling
from specdec_jax.base import Array, Params, Prompt
from specdec_jax.infer import quality
from specdec_jax.measure import calibration, loops, stopwatch
from specdec_jax.models import families
from specdec_jax.planning import aot, parts, planner, workloads
from specdec_jax.sharding import mesh as mesh_lib

MODULE = 'experiments.quantized'
_PROMPTS = Path('experiments/suite/prompts')
_CATALOGUES = Path('/usr/share/locale/de/LC_MESSAGES')
# What is compared; None is without packing.
WEIGHTS = (
  *(None, 'int8', 'int8:32'),
  *('int4', 'int4:64', 'int4:32', 'int3:32'),
)
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
# Targets of the tables of TPUs.
_TARGETS = 'llama_3_1_8b', 't5_1_1_xxl'
_CHIPS = 'v5e:1x1', 'v6e:1x1', 'v4:1x1x1'
_WINDOW = 256


def perplexities(num_windows: int) -> Table:
  """Of SmolLM2 on the suite's texts, and its guesses beside float32's."""
  rows, best = [], None
  texts = [
    json.loads(line)['text']
    for name in ('long_input', 'summarisation', 'retrieval')
    for line in (_PROMPTS / f'{name}.jsonl').read_text().splitlines()
  ]
  for dtype, weights, caches in (
    ('float32', None, None),
    *(('bfloat16', w, None) for w in WEIGHTS),
    *(('bfloat16', w, 'int8') for w in (None, 'int8')),
  ):
    decoder = _plain('smollm2-135m', dtype, weights, caches)
    ids = decoder.vocabulary.encode('\n\n'.join(texts))
    count = min(num_windows, len(ids) // _WINDOW)
    tokens = np.asarray(ids[: count * _WINDOW]).reshape(count, _WINDOW)
    run = jax.jit(functools.partial(_scored, config=decoder.config))
    found = [run(decoder.params.target, row[None]) for row in tokens]
    losses = np.concatenate([np.asarray(loss[0]) for loss, _ in found])
    guesses = np.concatenate([np.asarray(guess[0]) for _, guess in found])
    best = guesses if best is None else best
    rows.append(
      _names(decoder)
      | {
        'perplexity': f'{np.exp(losses.mean()):.3f}',
        'likeliest token is that of float32': f'{np.mean(guesses == best):.1%}',
      }
    )
  return Table(
    rows=rows,
    notes=[
      f'{losses.size} tokens of the texts of experiments/suite/prompts, '
      f'{_WINDOW} at a time, each window by itself. MB are those of the '
      'matrices and scales, of norms and of tables of positions.'
    ],
  )


def _scored(params: Any, tokens: Array, *, config: Any) -> tuple[Array, Array]:
  """Losses of all tokens but the first, and what is likeliest in their place:
  `[B, T - 1]` each."""
  model = families.language_model(config)
  ones = jnp.ones(len(tokens), jnp.int32)
  prompt = Prompt(
    encoder_tokens=None,
    decoder_tokens=tokens[:, :1],
    decoder_lengths=ones,
    row_ids=ones,
  )
  cache = model.init(params, prompt, tokens.shape[1])
  logits, _ = model.extend(params, tokens[:, :-1], cache)
  log_probs = jax.nn.log_softmax(logits)
  losses = -jnp.take_along_axis(log_probs, tokens[:, 1:, None], -1)[..., 0]
  return losses, jnp.argmax(logits, -1)


def bleus(num_texts: int) -> Table:
  """Of `ende-mini`, against the catalogues and against its own in float32."""
  pairs = common.spread([*_catalogue_pairs()], num_texts)
  sources, references = zip(*pairs, strict=True)
  rows: list[Cells] = []
  best: list[str] = []
  for dtype, weights in (
    ('float32', None),
    *(('bfloat16', w) for w in WEIGHTS),
  ):
    decoder = _plain('ende-mini', dtype, weights)
    texts = specdec_jax.generate(
      decoder, sources, max_new_tokens=64, batch_size=16
    )
    found = [each.text for each in texts]
    best = best or found
    rows.append(
      _names(decoder)
      | {
        'BLEU': f'{quality.bleu(references, found)["bleu"]:.2f}',
        "BLEU against float32's": f'{quality.bleu(best, found)["bleu"]:.1f}',
        "texts that are float32's": f'{np.mean(np.equal(best, found)):.1%}',
      }
    )
  return Table(
    rows=rows,
    notes=[
      f'Greedy, {len(pairs)} messages of 4 to 30 words from the German '
      'catalogues of the programs on this machine '
      f'({_CATALOGUES}/*.mo), on which nothing was trained: `ende-mini` knows '
      'package descriptions and LibreOffice.'
    ],
  )


def _catalogue_pairs() -> Iterator[tuple[str, str]]:
  """English messages without places to fill in, and their translations."""
  seen = set()
  for path in sorted(_CATALOGUES.glob('*.mo')):
    try:
      with path.open('rb') as file:
        messages = gettext.GNUTranslations(file)._catalog  # type: ignore
    except UnicodeDecodeError:  # Of another encoding than it says.
      continue
    for source, target in messages.items():
      if not isinstance(source, str) or source in seen:
        continue
      is_plain = not any(x in source + target for x in '%\n{}<>|&_')
      if is_plain and 4 <= len(source.split()) <= 30 and source != target:
        seen.add(source)
        yield source, target


def _plain(
  name: str, dtype: str, weights: str | None, cache_dtype: str | None = None
) -> Decoder:
  own = {'weights': weights, 'cache_dtype': cache_dtype}
  model = Model(checkpoint=name, dtype=dtype, **own)
  return decoder_lib.build(model, drafter=NoDrafter())


def _names(decoder: Decoder) -> Cells:
  model = decoder.model
  shapes = models.param_shapes(model, decoder.config)
  return {
    'weights': model.weights or model.dtype,
    'caches': model.cache_dtype or model.dtype,
    'activations': model.dtype,
    'MB': f'{mesh_lib.tree_bytes(shapes) / 1e6:.1f}',
  }


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
    sampling=Sampling(temperature=temperature),
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
      (dtype, weights): _plain(name, dtype, weights)
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
        full = stopwatch.always_full(width - 1)
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
        | _names(decoder)
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


def tpu_bytes(chip: str) -> Table:
  """What steps of compiled programs read, beside the packed weights."""
  rows = [
    *(('llama_3_1_8b', 'int8', c, 8, 4096 - 128) for c in (None, 'int8')),
    *(
      (name, w, None, 1, 64)
      for name in _TARGETS
      for w in (None, 'int8', 'int4')
    ),
    ('llama_3_1_8b', 'int4:128', None, 1, 64),
  ]
  return Table(
    rows=[_steps_of(*row, chip) for row in rows],
    notes=[
      'PREDICTED: compiled for the chip, none of it ran. A plain step is of '
      'one position, a verify step of five. "Over" is what crosses between '
      'memory and chip over what a step has to read: packed weights with '
      'their scales, but for an encoder and embeddings that are not read as '
      'logits, and full caches.'
    ],
  )


def _steps_of(
  target: str,
  weights: str | None,
  cache_dtype: str | None,
  batch_size: int,
  prompt: int,
  chip: str,
) -> Cells:
  decoder = workloads.decoder_of(
    *(target, 'none', None),
    dtype='bfloat16',
    weights=weights,
    cache_dtype=cache_dtype,
  )
  task = workloads.Workload(
    slice=aot.find_slice(chip),
    decoder=decoder,
    batch_size=batch_size,
    input_length=prompt,
    output_length=128,
    num_partitions=1,
  )
  shapes = parts.shapes_of(task, Fixed(0))
  cells: Cells = {
    'target': target,
    'weights': weights or 'bfloat16',
    'caches': cache_dtype or 'bfloat16',
    'rows': batch_size,
    'prompt': prompt,
  }
  wide = parts.shapes_of(dataclasses.replace(task, output_length=132), Fixed(0))
  jobs = [parts.target_step(shapes, 1), parts.target_step(wide, 5)]
  read, caches = _read_bytes(decoder), shapes.program.state.target_cache
  cells['weights read, GB'] = f'{read / 1e9:.2f}'
  cells['caches, GB'] = f'{mesh_lib.tree_bytes(caches) / 1e9:.2f}'
  read += mesh_lib.tree_bytes(caches)
  names = 'plain', 'verify'
  columns = ('{} step, GB', '{} step, over', '{} step, ms')
  cells |= {c.format(name): '' for name in names for c in columns}
  cells |= {'arguments, GB': '', 'temporaries, GB': '', 'fits': ''}
  try:
    costs = aot.price(aot.compile_all(jobs), task.slice.chip)
  except ValueError as error:
    return cells | {'fits': f'no: {str(error).rpartition(": ")[2]}'}
  for name, cost in zip(names, costs, strict=True):
    values = (
      f'{cost.memory_bytes / 1e9:.2f}',
      f'{cost.memory_bytes / read:.3f}',
      f'{1e3 * cost.seconds:.2f}',
    )
    cells |= {c.format(name): x for c, x in zip(columns, values, strict=True)}
  temporary = max(cost.temporary_bytes for cost in costs)
  arguments = costs[0].argument_bytes
  total = mesh_lib.tree_bytes((shapes.program.params, shapes.program.state))
  is_fitting = total + temporary <= task.slice.chip.memory_bytes
  return cells | {
    'arguments, GB': f'{arguments / 1e9:.2f}',
    'temporaries, GB': f'{temporary / 1e9:.3f}',
    'fits': 'yes' if is_fitting else f'no: {total / 2**30:.1f} GiB of weights',
  }


def _read_bytes(decoder: Decoder) -> int:
  """Bytes of the parameters that every step reads whole."""
  is_tied, total = decoder.config.is_tied, 0
  for path, leaf in jax.tree.leaves_with_path(decoder.params.target):
    names = [part.key for part in path]
    # Keys and values of the encoder's states are computed before the loop.
    is_before = 'encoder' in names or (
      'encoder_decoder_attention' in names and {'key', 'value'} & {*names}
    )
    if not is_before and (is_tied or 'embedding' not in names[-1]):
      total += mesh_lib.tree_bytes(leaf)
  return total


def gains(chip: str, results: Path) -> Table:
  """The best gamma of a target that drafts for itself, by compiled programs."""
  alphas = json.loads((results / 'acceptance.json').read_text())['rows']
  return Table(
    rows=[row for name in _TARGETS for row in _gains_of(name, chip, alphas)],
    notes=[
      'PREDICTED: programs compiled for the chip, none of which ran. Batch 1, '
      '64 tokens of input, 128 of output, activations in bfloat16, gamma at '
      f'most {_MAX_GAMMA}; targets in bfloat16 where they and the drafter fit, '
      'else in int8. Alpha is not of these targets: it is what the models in '
      'the column "alpha of" accept of drafts in as many bits, greedy. c is '
      'the time of a drafted token over a plain step of the target, and GiB '
      'those of both, with caches, before temporaries.'
    ],
  )


def _gains_of(
  target: str, chip: str, alphas: Sequence[dict[str, Any]]
) -> list[Cells]:
  # The most that is held is a drafter in 8 bits.
  make = functools.partial(_task, target, chip)
  weights = None if _fits(make(None, 8)) else 'int8'
  whole = parts.shapes_of(make(weights, 4), Fixed(_MAX_GAMMA))
  of_target = _compiled(make(weights, 4), whole, slice(0, 3))
  rows = []
  for bits in (4,) if weights else (8, 4):
    task = make(weights, bits)
    shapes = parts.shapes_of(task, Fixed(_MAX_GAMMA))
    programs = [*of_target, *_compiled(task, shapes, slice(3, 5))]
    priced = aot.price(programs, task.slice.chip)
    plain, _, verify, *_ = priced
    costs = parts.costs_of(_MAX_GAMMA, priced)
    # Those that leave layers out come later.
    found = {
      row['target']: float(row['alpha'])
      for row in reversed(alphas)
      if row['drafter'].startswith(f'{bits} bits,')
      and not int(row['temperature'])
    }
    for name, alpha in sorted(found.items()):
      best = planner.plan(alpha, costs, max_gamma=_MAX_GAMMA, length=128).best
      rows.append(
        {
          'target': target,
          'weights': weights or 'bfloat16',
          'drafter': f'{bits} bits',
          'T(1), ms': f'{1e3 * plain.seconds:.2f}',
          'T(9) / T(1)': f'{verify.seconds / plain.seconds:.2f}',
          'c': f'{costs.c(_MAX_GAMMA):.3f}',
          'alpha of': name,
          'alpha': f'{alpha:.3f}',
          'gamma': best.gamma,
          'times plain': f'{best.speedup:.2f}',
          'GiB': f'{_held(shapes) / 2**30:.1f}',
        }
      )
  return rows


def _held(shapes: parts.Shapes) -> int:
  """Bytes of a target, its drafter and their state."""
  program = shapes.program
  parameters = program.params.target, shapes.draft_params
  return mesh_lib.tree_bytes((parameters, program.state))


def _fits(task: workloads.Workload) -> bool:
  held = _held(parts.shapes_of(task, Fixed(_MAX_GAMMA)))
  return held < task.slice.chip.memory_bytes


def _task(
  target: str, chip: str, weights: str | None, bits: int
) -> workloads.Workload:
  return workloads.Workload(
    slice=aot.find_slice(chip),
    decoder=workloads.decoder_of(
      *(target, 'quantized', None),
      dtype='bfloat16',
      weights=weights,
      options={'bits': bits},
    ),
    batch_size=1,
    input_length=64,
    output_length=128,
    num_partitions=1,
  )


def _compiled(
  task: workloads.Workload, whole: parts.Shapes, which: slice
) -> list[tuple[Any, float]]:
  """Some of `parts.part_jobs`: of the target, then of the drafter."""
  jobs = parts.part_jobs(task, whole, _MAX_GAMMA, ()).values()
  return aot.compile_all([*jobs][which])


_MAX_GAMMA = 8
_TABLES = (
  *('perplexity', 'bleu', 'acceptance', 'steps'),
  *('tpu_bytes', 'tpu_gains'),
)


def main(argv: Sequence[str] | None = None) -> int:
  argv = sys.argv[1:] if argv is None else argv
  args = _parser().parse_args(argv)
  return common.finish('quantized', lambda: _run(args, argv))


def _run(args: argparse.Namespace, argv: Sequence[str]) -> None:
  where = (MODULE, argv), Path(args.output)
  titles = {
    'perplexity': 'SmolLM2-135M: perplexity by weights',
    'bleu': '`ende-mini`: BLEU by weights',
    'acceptance': 'Acceptance of a target in few bits that drafts for itself',
    'steps': 'Iterations on this device by weights',
  }
  makes: dict[str, Any] = {
    'perplexity': functools.partial(perplexities, args.num_windows),
    'bleu': functools.partial(bleus, args.num_texts),
    'acceptance': functools.partial(
      acceptance, args.targets, args.max_new_tokens
    ),
    'steps': functools.partial(
      steps, args.targets, args.max_new_tokens, args.repeats
    ),
  }
  for name in args.tables:
    if name in makes:
      report.measure(*where, name, titles[name], makes[name])
      continue
    for chip in args.chips:
      make, title = functools.partial(tpu_bytes, chip), 'bytes of a step'
      if name == 'tpu_gains':
        make = functools.partial(gains, chip, Path(args.output))
        title = 'targets that draft for themselves'
      slug = f'{name}_{chip.partition(":")[0]}'
      report.measure(*where, slug, f'{chip}: {title}, predicted', make)


def _parser() -> argparse.ArgumentParser:
  parser = argparse.ArgumentParser(
    prog=f'python -m {MODULE}', description=__doc__.splitlines()[0]
  )
  common.add_tables(parser, _TABLES)
  parser.add_argument('--chips', type=common.listed(), default=list(_CHIPS))
  parser.add_argument(
    '--targets', type=common.listed(), default=['smollm2-135m', 'ende-mini']
  )
  parser.add_argument('--output', default='experiments/quantized/results')
  common.add_counts(
    parser, num_windows=64, num_texts=200, max_new_tokens=48, repeats=5
  )
  return parser


if __name__ == '__main__':
  sys.exit(main())
