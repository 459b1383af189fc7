"""Measures the cells of a target: a category of prompts each."""

import dataclasses
import functools
import json
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from experiments import common
from experiments.report import Cells
from experiments.suite import auto, examples, table
from experiments.suite.examples import CONTROL, TRANSLATION, Example
from experiments.suite.settings import Settings
from specdec_jax.assembly import decoder as decoder_lib
from specdec_jax.assembly import models
from specdec_jax.assembly.decoder import Decoder
from specdec_jax.assembly.drafters import NoDrafter
from specdec_jax.assembly.models import Model
from specdec_jax.base import Params, Prompt, Tree
from specdec_jax.decoding import exact_bits
from specdec_jax.decoding.method import Method
from specdec_jax.launch import progress
from specdec_jax.measure import benchmark, comparison, loops, sameness
from specdec_jax.measure.benchmark import Drafted
from specdec_jax.measure.comparison import Row
from specdec_jax.measure.loops import CompiledLoop
from specdec_jax.models import families
from specdec_jax.text import prompts

Ids = list[list[int]]
# The drafter, as the table names it, and its gamma.
Key = tuple[str, int]

# Of the targets that come with a smaller model, and of the others.
_DRAFTERS = {
  'ende-mini': ('model=ende-nano', 'prompt_lookup', 'none'),
  'lm-mini': ('model=lm-nano', 'prompt_lookup', 'none'),
}
_OTHERS = ('prompt_lookup', 'ngram', 'none')
# What a cell is measured for.
_SETTING = ('target', 'category', 'temperature', 'batch_size')
# Columns that `comparison.figures` has by the same names, and by others.
_SAME = (
  *('alpha', 'c', 'verify_cost_ratio', 'without_draft_cost_ratio', 'speedup'),
  *('speculative_tokens_per_second', 'speedup_interval', 'predicted_speedup'),
  'rows',
)
_OTHERWISE = {
  'tokens_per_target_run': 'block_efficiency',
  'plain_tokens_per_second': 'autoregressive_tokens_per_second',
}
# Positions whose conditional acceptance is reported.
_NUM_ALPHAS = 3
# A smaller logit margin is within the rounding of the dtype.
_NEAR_TIES = {'float32': 1e-3, 'bfloat16': 0.25}
# Prompts are padded to one of these, and to a single one up to the second: few
# shapes are compiled.
_WIDTHS = (64, 256, 1024, 4096)


def widths(longest: Mapping[str, int]) -> dict[str, int]:
  """Returns what prompts are padded to, by category; from tokens of the
  longest."""
  found = {
    name: next(width for width in (*_WIDTHS, length) if width >= length)
    for name, length in longest.items()
  }
  short = [width for width in found.values() if width <= _WIDTHS[1]]
  return {n: max(short) if w in short else w for n, w in found.items()}


def row(figures: Mapping[str, Any], *, dtype: str, is_greedy: bool) -> Cells:
  """Returns what the table says of figures of `comparison`; dtype is that whose
  rounding makes near ties, and sampled texts are not compared."""
  alphas = [*figures['alpha_by_position'], *[None] * _NUM_ALPHAS]
  near = sum(m < _NEAR_TIES[dtype] for m in figures['divergence_margins'])
  return {
    **{name: figures[name] for name in _SAME},
    **{name: figures[other] for name, other in _OTHERWISE.items()},
    **{f'alpha_{i + 1}': alphas[i] for i in range(_NUM_ALPHAS)},
    'identical_rows': figures['rows'] - figures['num_divergent_rows']
    if is_greedy
    else None,
    'near_ties': near if is_greedy else None,
  }


def _of_one_width(
  loop: CompiledLoop, method: Method
) -> tuple[CompiledLoop, CompiledLoop]:
  """Plain and drafted decoding as with `exact_bits`."""
  method = exact_bits.of_one_width(method)
  return loops.like(loop, exact_bits.plain(method)), loops.like(loop, method)


def _num_divergent(plain: CompiledLoop, drafted: CompiledLoop) -> int:
  """Counts rows in which two loops decode different tokens."""
  target = plain.program.method.target
  states = plain.decode(), drafted.decode()
  return sameness.sameness(target, plain.params, *states).num_divergent_rows


def _compile_ways(
  decoders: Mapping[Key, Decoder], *, args: Any, max_len: int
) -> dict[Key, CompiledLoop]:
  """Compiles decoders for `args`, a key of draws and prompts."""
  made: dict[Key, CompiledLoop] = {}
  for name in dict.fromkeys(name for name, _ in decoders):
    own = {key: each for key, each in decoders.items() if key[0] == name}
    made |= common.speculative_loops(
      next(iter(own.values())).params,
      *args,
      methods={key: decoder.method for key, decoder in own.items()},
      max_len=max_len,
    )
  return made


@dataclasses.dataclass(frozen=True)
class Programs:
  """Ways of decoding prompts of one shape, compiled: plain ones by dtype, and
  drafted ones by drafter and gamma; and with `exact_bits` plain and drafted
  ones of one width.

  `verifying` is the plain one in the dtype that verifies, and `compile` makes
  loops of other `decoders` of the same weights.
  """

  plain: Mapping[str, CompiledLoop]
  verifying: CompiledLoop
  baseline: str
  decoders: Mapping[Key, Decoder]
  compile: Callable[[Mapping[Key, Decoder]], dict[Key, CompiledLoop]]
  ways: Mapping[Key, Drafted]
  exact: Mapping[Key, tuple[CompiledLoop, CompiledLoop]]
  _others: dict[Key, Drafted] = dataclasses.field(default_factory=dict)

  def chains(self) -> dict[str, dict[int, CompiledLoop]]:
    """Returns the loops of drafters of chains by gamma, by drafter."""
    found: dict[str, dict[int, CompiledLoop]] = {}
    for (name, gamma), way in self.ways.items():
      if gamma and way.drafter.tree is None:
        found.setdefault(name, {})[gamma] = way.loop
    return found

  def way(self, name: str, gamma: int) -> Drafted:
    """Returns a drafter of chains with any gamma, 0 being plain decoding,
    compiled once."""
    key = name, gamma
    if key in self.ways:
      return self.ways[key]
    if key not in self._others:
      loop = self.verifying
      if gamma:
        made = next(each for (x, _), each in self.decoders.items() if x == name)
        loop = self.compile({key: made.at(gamma)})[key]
      self._others[key] = benchmark.drafted(loop)
    return self._others[key]


class Target:
  """A target, its weights by dtype, and those of what drafts for it."""

  def __init__(self, settings: Settings, name: str, folder: Path):
    self.settings, self.name, self.folder = settings, name, folder
    self.plain = {
      dtype: decoder_lib.build(
        Model(checkpoint=name, dtype=dtype),
        drafter=NoDrafter(),
        waiting=progress.waiting,
      )
      for dtype in sorted({*settings.plain_dtypes, settings.dtype})
    }
    self.alone = self.plain[settings.dtype]
    self.weights: dict[Model, Any] = {}
    self.num_cells = 0  # So far.

  def prompts(
    self, sets: Mapping[str, Sequence[Example]]
  ) -> tuple[dict[str, Ids], list[str]]:
    """Returns token ids of each category that fits, and a sentence on the
    others."""
    settings, alone = self.settings, self.alone
    vocabulary = alone.vocabulary
    is_translator = families.has_encoder(alone.config)
    names = settings.categories or [*sets, CONTROL]
    found: dict[str, Ids] = {}
    for name in names:
      if name == CONTROL:
        ids = set(range(vocabulary.vocab_size)) - vocabulary.special_ids
        rows = examples.random_tokens(sorted(ids), settings.num_prompts)
      elif is_translator and name != TRANSLATION:
        continue
      else:
        rows = prompts.encode(
          vocabulary,
          [
            examples.shown(each, is_translator)
            for each in sets[name][: settings.num_prompts]
          ],
          config=alone.config,
          is_chat=vocabulary.chat_template is not None,
        )
      num_new = 0 if is_translator else settings.max_new_tokens
      longest = max(map(len, rows))
      needed = prompts.num_positions(alone.config, longest, num_new)
      if needed <= alone.max_positions:
        found[name] = rows
    missing = ', '.join(name for name in names if name not in found)
    note = f'Left out for {self.name}, which they do not fit: {missing}.'
    return found, [note] if missing else []

  def measure(
    self, ids: Mapping[str, Ids], temperature: float, batch_size: int
  ) -> list[Cells]:
    """Returns the rows of all categories; those in the folder are read."""
    shapes = widths({n: max(map(len, rows)) for n, rows in ids.items()})
    found: dict[str, list[Cells]] = {}
    for width in sorted(set(shapes.values())):
      programs = None
      for name in (name for name in ids if shapes[name] == width):
        values = (self.name, name, temperature, batch_size)
        setting = dict(zip(_SETTING, values, strict=True))
        file = re.sub(r'[^\w.-]+', '_', '-'.join(map(str, values)))
        path = self.folder / 'cells' / f'{file}.json'
        if not path.exists():
          batches = self._batches(ids[name], width, batch_size)
          programs = programs or self._compile(batches[0], temperature)
          rows = self._rows(programs, batches, setting, len(ids))
          table.write_text(path, json.dumps(rows, indent=1))
        self.num_cells += 1
        found[name] = json.loads(path.read_text(encoding='utf-8'))
    return [row for name in ids for row in found[name]]

  def _batches(self, ids: Ids, width: int, batch_size: int) -> list[Prompt]:
    return [
      jax.tree.map(
        jnp.asarray,
        prompts.pack(
          [*part, *[None] * (batch_size - len(part))],
          config=self.alone.config,
          width=width,
          max_new_tokens=self.settings.max_new_tokens,
          row_ids=range(start, start + batch_size),
        ),
      )
      for start in range(0, len(ids), batch_size)
      for part in [ids[start : start + batch_size]]
    ]

  def _decoders(self, temperature: float) -> dict[Key, Decoder]:
    """Makes the decoders by drafter and gamma, which share the weights."""
    settings, found = self.settings, {}
    rule = settings.rule()
    target = self.alone.params.target
    for text in settings.drafters or _DRAFTERS.get(self.name, _OTHERS):
      choice = settings.drafter(text, self.folder)
      made = decoder_lib.outline(
        self.alone.model,
        drafter=choice,
        rule=rule,
        sampling=settings.sampling(temperature),
      )
      drafting, (kind, _, model) = made.parts.drafting, text.partition('=')
      if drafting.model is not None and drafting.model not in self.weights:
        with progress.waiting(f'loading {model}'):
          self.weights[drafting.model] = models.read_params(
            drafting.model, drafting.config
          )
      own = self.weights.get(drafting.model, ())
      made = dataclasses.replace(
        made, params=Params(target, drafting.join(target, own))
      )
      name, *options = kind.split('+')
      name = '+'.join([model or name, *options])
      is_one = isinstance(made.recipe.length, Tree) or choice == NoDrafter()
      for gamma in settings.numbers:
        each = made if is_one else made.at(gamma)
        found[name, each.drafter.gamma] = each
    return found

  def _compile(self, prompt: Prompt, temperature: float) -> Programs:
    """Compiles all ways of decoding batches of the shape of `prompt`."""
    settings, key = self.settings, jax.random.key(self.settings.seed)
    max_len = prompt.decoder_tokens.shape[1] + settings.max_new_tokens
    args: Any = (key, [prompt])
    to_probs = settings.sampling(temperature).to_probs
    with progress.waiting(f'compiling for {self.name}', notice_after=30):
      plain = {
        dtype: loops.plain_loop(
          alone.params,
          *args,
          method=dataclasses.replace(
            alone.method,
            logits_to_probs=to_probs(alone.parts.target_info.vocab_size),
          ),
          max_len=max_len,
        )
        for dtype, alone in self.plain.items()
      }
      decoders = self._decoders(temperature)
      made = _compile_ways(decoders, args=args, max_len=max_len)
      return Programs(
        plain=plain,
        verifying=plain[settings.dtype],
        baseline=loops.fastest(plain)[0],
        decoders=decoders,
        compile=functools.partial(_compile_ways, args=args, max_len=max_len),
        ways={key: benchmark.drafted(loop) for key, loop in made.items()},
        exact={
          key: _of_one_width(loop, decoders[key].method)
          for key, loop in made.items()
          if settings.exact_bits and not temperature and key[1]
        },
      )

  def _compare(
    self,
    programs: Programs,
    ways: Mapping[Key, Drafted],
    batches: Sequence[Prompt],
    title: str,
  ) -> dict[Key, Row]:
    """Times ways of decoding some batches."""
    dtype, baseline = self.settings.dtype, programs.baseline
    plain = {
      each: programs.plain[each].on(batches) for each in {dtype, baseline}
    }
    rows = benchmark.compare(
      plain[dtype],
      [
        dataclasses.replace(way, loop=way.loop.on(batches))
        for way in ways.values()
      ],
      baseline=plain[baseline],
      repeats=self.settings.repeats,
      title=title,
    )
    return dict(zip(ways, rows, strict=True))

  def _rows(
    self,
    programs: Programs,
    batches: Sequence[Prompt],
    setting: Mapping[str, Any],
    num_categories: int,
  ) -> list[Cells]:
    """Measures a cell, one of the target's in as many categories."""
    settings, baseline = self.settings, programs.baseline
    num_ways = len(settings.temperatures) * len(settings.batch_sizes)
    done = f'{self.num_cells} of {num_ways * num_categories} cells done'
    title = f'{self.name}, {setting["category"]} ({done})'
    found = self._compare(programs, programs.ways, batches, title)
    choosing, others = auto.halves(batches)
    if settings.is_auto and others:
      choices = {
        name: auto.choose(programs.verifying, drafting, choosing)
        for name, drafting in programs.chains().items()
      }
      ways = {
        (name + auto.SUFFIX, gamma): programs.way(name, gamma)
        for name, gamma in choices.items()
      }
      found |= self._compare(programs, ways, others, f'{title}, auto')
    is_greedy = not setting['temperature']
    divergent = {
      key: _num_divergent(*(loop.on(batches) for loop in pair))
      for key, pair in programs.exact.items()
    }
    return [
      {**setting, 'plain': baseline, 'drafter': drafter, 'gamma': gamma}
      | row(
        comparison.figures(compared),
        dtype=settings.dtype,
        is_greedy=is_greedy,
      )
      | {
        'exact_rows': compared.num_rows - divergent[drafter, gamma]
        if (drafter, gamma) in divergent
        else None
      }
      for (drafter, gamma), compared in found.items()
    ]
