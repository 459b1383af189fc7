"""`specdec bench --suite`: categories, drafters, gammas, temperatures and batch
sizes, in one process and one table."""

import argparse
import itertools
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from specdec_jax.assembly import drafting
from specdec_jax.assembly.choices import Sampling, flags_of, named_by_flags
from specdec_jax.assembly.drafting import DRAFTERS
from specdec_jax.cli import options, suite_cells, suite_report
from specdec_jax.files import one_writer
from specdec_jax.files.local_path import local_path
from specdec_jax.launch import compilation_cache, progress
from specdec_jax.launch.numbers import positive_int
from specdec_jax.text import suite_prompts

_TARGETS = 'smollm2-135m,ende-mini'
# Of the targets that come with a smaller model.
_DRAFTERS = {
  'ende-mini': ('model=ende-nano', 'prompt_lookup', 'none'),
  'lm-mini': ('model=lm-nano', 'prompt_lookup', 'none'),
}
_OTHERS = ('prompt_lookup', 'ngram', 'none')
# Options of `bench` alone, and what the suite has for them.
_REPLACED = {
  'model': '--suite MODEL',
  'draft_model': '--drafters model=MODEL',
  'drafter': '--drafters',
  'gamma': '--gammas',
  'temperature': '--temperatures',
  'batch_size': '--batch_sizes',
  'max_new_tokens': '--suite_tokens',
  'repeats': '--suite_repeats',
  'json': '--out DIR',
  **dict.fromkeys(('prompt', 'prompts'), '--categories'),
  **dict.fromkeys(
    ('config', 'draft_config', 'vocabulary', 'revision', 'adaptive', 'chat',
     'min_prob', 'draft_cost', 'system', 'num_devices', 'simulate_alpha')
  ),
}  # fmt: skip


def listed(kind: Callable[[str], Any]) -> Callable[[str], list]:
  """An argparse type: values with commas between, each once."""
  return lambda text: list(
    dict.fromkeys(kind(part.strip()) for part in text.split(','))
  )


def add_arguments(parser: argparse.ArgumentParser) -> None:
  group = parser.add_argument_group('suite')
  names = listed(str)
  known = ', '.join(suite_prompts.CATEGORIES)
  flags: tuple[tuple[str, Any, Any, str], ...] = (
    ('categories', names, None,
     f'of {known}, and of the public sets (default: what fits the target)'),
    ('drafters', names, None,
     'prompt_lookup, ngram, uniform, none, or KIND=MODEL such as '
     'model=ende-nano (default: by target)'),
    ('gammas', listed(drafting.gamma_number), [4, 8], 'of every drafter'),
    ('temperatures', listed(options.temperature), [0.0], '0 is greedy'),
    ('batch_sizes', listed(positive_int), [1], 'rows decoded at once'),
    ('suite_prompts', positive_int, 5, 'the first ones of each category'),
    ('suite_tokens', positive_int, 40, 'new tokens per prompt'),
    ('suite_repeats', positive_int, 2, 'timed turns of each prompt'),
    ('spec_bench', str, None, 'folder of Spec-Bench, for its categories'),
    ('speed_bench', str, None, 'folder of SPEED-Bench, likewise'),
    ('out', str, 'out/suite', 'folder of cells, tables and the plot; a suite '
     'that was interrupted goes on there'),
  )  # fmt: skip
  for flag, kind, default, text in flags:
    group.add_argument(f'--{flag}', type=kind, default=default, help=text)
  group.add_argument(
    '--suite',
    nargs='?',
    const=names(_TARGETS),
    type=names,
    metavar='MODELS',
    help='measure all categories, drafters, gammas, temperatures and batch '
    f'sizes, for these targets ({_TARGETS} if none is named)',
  )
  default = parser.get_default
  parser.set_defaults(
    own={action.dest: action.default for action in group._group_actions},
    replaced={name: default(name) for name in _REPLACED},
  )


@named_by_flags('--{}')
def check(args: argparse.Namespace) -> None:
  """Raises ValueError for options that do not fit `--suite`, or its absence."""
  given = lambda defaults: [
    name for name, value in defaults.items() if getattr(args, name) != value
  ]
  if args.suite is None:
    for name in given(args.own):
      raise ValueError(f'--{name} is for --suite, which is not given')
    if args.prompt is None and args.prompts is None:
      raise ValueError('give --prompt, --prompts or --suite')
    return
  for name in given(args.replaced):
    hint = f': give {_REPLACED[name]}' if _REPLACED[name] else ''
    raise ValueError(f'--{name} does not fit --suite{hint}')
  for text in args.drafters or ():
    kind, _, model = text.partition('=')
    if kind not in DRAFTERS:
      raise ValueError(
        f'--drafters {text}: {kind!r} is none of {", ".join(DRAFTERS)}'
      )
    if drafting.has_model(DRAFTERS[kind]) != bool(model):
      form = 'takes no model' if model else 'is written KIND=MODEL'
      raise ValueError(f'--drafters {text}: {kind} {form}')
  if max(args.batch_sizes) > args.suite_prompts:
    raise ValueError(
      f'--batch_sizes {max(args.batch_sizes)} is more than the '
      f'{args.suite_prompts} prompts per category: raise --suite_prompts'
    )
  limits = {name: getattr(args, name) for name in ('top_k', 'top_p', 'min_p')}
  Sampling(temperature=max(args.temperatures), **limits).check_is_used()
  names = {name for target in args.suite for name in _drafters(args, target)}
  kinds = [DRAFTERS[name.partition('=')[0]] for name in names]
  used = {flag for kind in kinds for flag in flags_of(kind)} | {'gamma'}
  for flag in {flag for kind in DRAFTERS.values() for flag in flags_of(kind)}:
    if flag not in used and getattr(args, flag) is not None:
      raise ValueError(f'--{flag} is for none of {", ".join(sorted(names))}')


def _drafters(args: argparse.Namespace, target: str) -> Sequence[str]:
  return args.drafters or _DRAFTERS.get(target, _OTHERS)


@named_by_flags('--{}')
def run(args: argparse.Namespace) -> int:
  """Measures what is missing, and writes the tables."""
  sets = suite_prompts.own()
  for folder, read in (
    (args.spec_bench, suite_prompts.spec_bench),
    (args.speed_bench, suite_prompts.speed_bench),
  ):
    sets |= read(folder) if folder else {}
  known = [*sets, suite_prompts.CONTROL]
  for name in args.categories or ():
    if name not in known:
      raise ValueError(f'--categories {name!r} is none of {", ".join(known)}')
  compilation_cache.enable()
  folder, header = local_path(args.out), suite_report.header(args)
  rows: list[dict[str, Any]] = []
  notes: list[str] = []
  with one_writer.one_writer(folder / '.lock', folder):
    _begin(folder, header, sets)
    for name in args.suite:
      target = suite_cells.Target(args, name, _drafters(args, name))
      found, left_out = target.prompts(sets)
      notes += left_out
      for setting in itertools.product(args.temperatures, args.batch_sizes):
        rows += target.measure(found, *setting)
    suite_report.write(folder, header, rows, notes)
  screen = progress.console(color=args.color)
  screen.print(suite_report.table(header, rows, notes, screen.width))
  screen.print(f'All columns: {folder}/suite.md; the plot: suite.svg.')
  return 0


def _begin(
  folder: Path, header: Mapping[str, Any], sets: Mapping[str, Any]
) -> None:
  """Makes the folder, or finds one that was begun in the same way.

  Raises:
    ValueError: if it was begun in another.
  """
  (folder / 'cells').mkdir(parents=True, exist_ok=True)
  path = folder / 'settings.json'
  if path.exists():
    flat = lambda settings: {**settings, **settings['flags'], 'flags': None}
    before, now = (
      flat(json.loads(path.read_text(encoding='utf-8'))),
      flat(header),
    )
    for name in {**before, **now}:
      if before.get(name) != now.get(name):
        raise ValueError(
          f'{folder} was begun with {name} {before.get(name)}, not '
          f'{now.get(name)}: give another --out'
        )
  suite_cells.write(path, json.dumps(header, indent=2))
  texts = [
    suite_prompts.shown(example, is_translator=False)
    for name in suite_prompts.CATEGORIES[:-1]
    for example in sets[name]
  ]
  suite_cells.write(folder / suite_cells.NGRAM_TEXT, '\n\n'.join(texts))
