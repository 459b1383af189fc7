"""`specdec bench --suite`: categories, drafters, gammas, temperatures and batch
sizes, in one process and one table."""

import argparse
import itertools
import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from specdec_jax.assembly import decoder as decoder_lib
from specdec_jax.assembly import models, option_fields
from specdec_jax.assembly.drafters import DRAFTERS, NoDrafter
from specdec_jax.assembly.drafters.choice import has_model
from specdec_jax.assembly.lengths import gamma_number
from specdec_jax.assembly.models import Model
from specdec_jax.assembly.rules import RULES
from specdec_jax.assembly.sampling import Sampling
from specdec_jax.base import Params, Prompt
from specdec_jax.cli import options, outputs
from specdec_jax.decoding.method import Method
from specdec_jax.files import one_writer
from specdec_jax.files.paths import local_path
from specdec_jax.launch import compilation_cache, progress
from specdec_jax.launch.numbers import positive_int
from specdec_jax.measure import suite, suite_report
from specdec_jax.measure.suite import Programs, Way
from specdec_jax.models import families
from specdec_jax.text import prompts, suite_prompts
from specdec_jax.text.suite_prompts import CONTROL, TRANSLATION

_Ids = list[list[int]]

# What a cell is measured for.
_SETTING = ('target', 'category', 'temperature', 'batch_size')
_TARGETS = 'smollm2-135m,ende-mini'
# Of the targets that come with a smaller model.
_DRAFTERS = {
  'ende-mini': ('model=ende-nano', 'prompt_lookup', 'none'),
  'lm-mini': ('model=lm-nano', 'prompt_lookup', 'none'),
}
_OTHERS = ('prompt_lookup', 'ngram', 'none')
# What the n-gram drafter counts unless another text is given.
_NGRAM_TEXT = 'ngram_text.txt'
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
     'min_prob', 'draft_cost', 'system', 'num_devices', 'simulate_alpha',
     'tree', 'num_continuations')
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
     'model=ende-nano or eagle+lookup=HEAD (default: by target)'),
    ('gammas', listed(gamma_number), [4, 8], 'of every drafter'),
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
  parser.set_defaults(
    own={action.dest: action.default for action in group._group_actions},
    replaced={name: parser.get_default(name) for name in _REPLACED},
  )


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
    kind, switches, model = _parts(text)
    if kind not in DRAFTERS:
      raise ValueError(
        f'--drafters {text}: {kind!r} is none of {", ".join(DRAFTERS)}'
      )
    if unknown := {*switches} - {*option_fields.switches_of(DRAFTERS[kind])}:
      raise ValueError(f'--drafters {text}: {kind} has no {min(unknown)!r}')
    if has_model(DRAFTERS[kind]) != bool(model):
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
  kinds = {DRAFTERS[_parts(name)[0]] for name in names}
  used = {'gamma'}.union(*map(option_fields.options_of, kinds))
  for flag in set().union(*map(option_fields.options_of, DRAFTERS.values())):
    if flag not in used and getattr(args, flag) is not None:
      raise ValueError(f'--{flag} is for none of {", ".join(sorted(names))}')


def _parts(text: str) -> tuple[str, list[str], str]:
  """The kind of a drafter in `--drafters`, what is switched on, its model."""
  kind, _, model = text.partition('=')
  kind, *switches = kind.split('+')
  return kind, switches, model


def _drafters(args: argparse.Namespace, target: str) -> Sequence[str]:
  return args.drafters or _DRAFTERS.get(target, _OTHERS)


def _sampling(args: argparse.Namespace, temperature: float) -> Sampling:
  """Of greedy decoding without the limits of what is sampled."""
  names = ('top_k', 'top_p', 'min_p') if temperature else ()
  limits = {name: getattr(args, name) for name in names}
  return Sampling(temperature=temperature, **limits)


def run(args: argparse.Namespace) -> int:
  """Measures what is missing, and writes the tables."""
  sets = suite_prompts.own()
  for name in suite_prompts.PUBLIC:
    if path := getattr(args, name.lower().replace('-', '_')):
      sets |= suite_prompts.public(name, path)
  known = [*sets, CONTROL]
  for name in args.categories or ():
    if name not in known:
      raise ValueError(f'--categories {name!r} is none of {", ".join(known)}')
  compilation_cache.enable()
  apart = ('out', 'color', 'command', 'run_command', 'own', 'replaced')
  changed = {
    name: value
    for name, value in sorted(vars(args).items())
    if name not in apart and value not in (None, False, args.replaced.get(name))
  }
  folder = local_path(args.out)
  header = suite_report.header(args.dtype, changed)
  rows: list[dict[str, Any]] = []
  notes: list[str] = []
  with one_writer.one_writer(folder / '.lock', folder):
    suite_report.begin(folder, header)
    texts = [
      suite_prompts.shown(example, is_translator=False)
      for name in suite_prompts.CATEGORIES[:-1]
      for example in sets[name]
    ]
    suite_report.write_text(folder / _NGRAM_TEXT, '\n\n'.join(texts))
    for name in args.suite:
      target = _Target(args, name)
      found, left_out = target.prompts(sets)
      notes += left_out
      for setting in itertools.product(args.temperatures, args.batch_sizes):
        rows += target.measure(found, *setting)
    plot = suite_report.write(folder, header, rows, notes)
  screen = progress.console(color=args.color)
  screen.print(outputs.suite_table(header, rows, notes, screen.width))
  screen.print(f'All columns: {folder}/suite.md; the plot: {plot}.')
  return 0


class _Target:
  """A target, and what drafts for it as `--drafters` names it."""

  def __init__(self, args: argparse.Namespace, name: str):
    self.args, self.name, self.folder = args, name, local_path(args.out)
    # The target by dtype, and the weights of draft models by name.
    self.plain = {
      dtype: decoder_lib.build(
        Model(checkpoint=name, dtype=dtype),
        drafter=NoDrafter(),
        waiting=progress.waiting,
      )
      for dtype in sorted({*args.plain_dtypes, args.dtype})
    }
    self.weights: dict[str, Any] = {}
    self.alone = self.plain[args.dtype]

  def prompts(
    self, sets: Mapping[str, Sequence[suite_prompts.Example]]
  ) -> tuple[dict[str, _Ids], list[str]]:
    """Token ids of each category that fits, and a sentence on the others."""
    args, vocabulary = self.args, self.alone.vocabulary
    is_translator = families.has_encoder(self.alone.config)
    names = args.categories or [*sets, CONTROL]
    found: dict[str, _Ids] = {}
    for name in names:
      if name == CONTROL:
        ids = set(range(vocabulary.vocab_size)) - vocabulary.special_ids
        rows = suite_prompts.random_tokens(sorted(ids), args.suite_prompts)
      elif is_translator and name != TRANSLATION:
        continue
      else:
        examples = sets[name][: args.suite_prompts]
        rows = prompts.encode(
          vocabulary,
          [suite_prompts.shown(each, is_translator) for each in examples],
          config=self.alone.config,
          is_chat=vocabulary.chat_template is not None,
        )
      num_new = 0 if is_translator else args.suite_tokens
      longest = max(map(len, rows))
      needed = prompts.num_positions(self.alone.config, longest, num_new)
      if needed <= self.alone.max_positions:
        found[name] = rows
    missing = ', '.join(name for name in names if name not in found)
    note = f'Left out for {self.name}, which they do not fit: {missing}.'
    return found, [note] if missing else []

  def measure(
    self, ids: Mapping[str, _Ids], temperature: float, batch_size: int
  ) -> list[dict[str, Any]]:
    """The rows of all categories; those that are in the folder are read."""
    shapes = suite.widths({n: max(map(len, rows)) for n, rows in ids.items()})
    ways: dict[Any, Way] = {}
    cells: dict[str, list[dict[str, Any]]] = {}
    for width in sorted(set(shapes.values())):
      programs = None
      for name in (name for name in ids if shapes[name] == width):
        values = (self.name, name, temperature, batch_size)
        setting = dict(zip(_SETTING, values, strict=True))
        file = re.sub(r'[^\w.-]+', '_', '-'.join(map(str, values)))
        path = self.folder / 'cells' / f'{file}.json'
        if not path.exists():
          batches = self._batches(ids[name], width, batch_size)
          ways = ways or self._ways(temperature)
          programs = programs or self._compile(ways, batches[0])
          rows = self._rows(programs, batches, setting)
          suite_report.write_text(path, json.dumps(rows, indent=1))
        cells[name] = json.loads(path.read_text(encoding='utf-8'))
      if programs:
        ways = programs.ways
    return [row for name in ids for row in cells[name]]

  def _batches(self, ids: _Ids, width: int, batch_size: int) -> list[Prompt]:
    return [
      jax.tree.map(
        jnp.asarray,
        prompts.pack(
          [*part, *[None] * (batch_size - len(part))],
          config=self.alone.config,
          width=width,
          max_new_tokens=self.args.suite_tokens,
          row_ids=range(start, start + batch_size),
        ),
      )
      for start in range(0, len(ids), batch_size)
      for part in [ids[start : start + batch_size]]
    ]

  def _compile(self, ways: Mapping[Any, Way], prompt: Prompt) -> Programs:
    """All ways of decoding batches of the shape of one."""
    with progress.waiting(f'compiling for {self.name}', notice_after=30):
      return Programs(
        ways,
        jax.random.key(self.args.seed),
        prompt,
        plain=self.args.dtype,
        max_len=prompt.decoder_tokens.shape[1] + self.args.suite_tokens,
      )

  def _rows(
    self,
    programs: Programs,
    batches: Sequence[Prompt],
    setting: Mapping[str, Any],
  ) -> list[dict[str, Any]]:
    """Measures a cell."""
    title = f'{self.name}, {setting["category"]}'
    with progress.bar(title, len(batches)) as bar:
      found = programs.measure(
        batches,
        repeats=self.args.suite_repeats,
        is_greedy=not setting['temperature'],
        advance=bar.advance,
      )
    shared = {**setting, 'plain': programs.baseline}
    return [
      {**shared, 'drafter': drafter, 'gamma': gamma}
      | figures
      | {'compile_seconds': programs.compile_seconds}
      for (drafter, gamma), figures in found.items()
    ]

  def _ways(self, temperature: float) -> dict[Any, Way]:
    """All ways of decoding: plain ones by dtype, and others by drafter and
    gamma."""
    sampling, ways = _sampling(self.args, temperature), {}
    for dtype, alone in self.plain.items():
      ways[dtype] = Way(
        params=alone.params,
        method=Method(
          target=alone.target,
          logits_to_probs=sampling.to_probs(alone.vocabulary.vocab_size),
          eos_id=alone.eos_id,
        ),
        is_plain=True,
        prefill='' if dtype == self.args.dtype else dtype,
      )
    for text in _drafters(self.args, self.name):
      kind, switches, model = _parts(text)
      name = '+'.join([model or kind, *switches])
      for gamma in [0] if DRAFTERS[kind] is NoDrafter else self.args.gammas:
        way = self._way(text, gamma, sampling)
        # States of drafters are their own; without an encoder or a model they
        # are empty.
        is_own = model or families.has_encoder(self.alone.config)
        prefill = name if is_own else ''
        if way.method.drafter.reads_target_cache:
          prefill += f', gamma {gamma}'  # The target keeps so many features.
        ways[name, gamma] = way._replace(prefill=prefill)
    return ways

  def _way(self, text: str, gamma: int, sampling: Sampling) -> Way:
    """Speculative decoding by one of `--drafters`."""
    args, (kind, switches, model) = self.args, _parts(text)
    given = {
      flag: getattr(args, flag)
      for flag in option_fields.options_of(DRAFTERS[kind])
    }
    fixed: dict[str, Any] = {}
    if model:
      dtype = args.draft_dtype or args.dtype
      fixed['model'] = Model(checkpoint=model, dtype=dtype)
    if kind == 'ngram':
      fixed['ngram_text'] = args.ngram_text or str(self.folder / _NGRAM_TEXT)
    given |= {'gamma': gamma, **dict.fromkeys(switches, True)}
    made = decoder_lib.outline(
      self.alone.model,
      drafter=option_fields.chosen('drafter', DRAFTERS, kind, given, **fixed),
      rule=option_fields.chosen(
        'verification', RULES, args.verification, vars(args)
      ),
      sampling=sampling,
    )
    drafted, target = made.drafting, self.alone.params.target
    if drafted.config is not None and model not in self.weights:
      with progress.waiting(f'loading {model}'):
        self.weights[model] = models.read_params(fixed['model'], drafted.config)
    own = drafted.join(target, self.weights.get(model, ()))
    return Way(Params(target, own), made.method)
