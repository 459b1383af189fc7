"""The cells of the suite: what is decoded, in which ways, and what is kept."""

import argparse
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from specdec_jax.assembly import decoder as decoder_lib
from specdec_jax.assembly import models
from specdec_jax.assembly.choices import Sampling, chosen, flags_of
from specdec_jax.assembly.drafting import DRAFTERS, NoDrafter
from specdec_jax.assembly.models import Model
from specdec_jax.assembly.rules import RULES
from specdec_jax.base import Params, Prompt
from specdec_jax.files import replacing
from specdec_jax.files.local_path import local_path
from specdec_jax.launch import progress
from specdec_jax.measure import sides, suite
from specdec_jax.measure.suite import BASELINE, PLAIN, Programs, Way
from specdec_jax.models import families
from specdec_jax.text import prompts, suite_prompts
from specdec_jax.text.suite_prompts import CONTROL, TRANSLATION, Example

Ids = list[list[int]]
Row = dict[str, Any]

# What the n-gram drafter counts unless another text is given.
NGRAM_TEXT = 'ngram_text.txt'
# Prompts are padded to one of these, and to a single one up to the second: few
# shapes are compiled.
_WIDTHS = (64, 256, 1024, 4096)


def widths(longest: Mapping[str, int]) -> dict[str, int]:
  """What prompts are padded to, by category; from tokens of the longest."""
  found = {
    name: next(width for width in (*_WIDTHS, length) if width >= length)
    for name, length in longest.items()
  }
  short = [width for width in found.values() if width <= _WIDTHS[1]]
  return {n: max(short) if w in short else w for n, w in found.items()}


def write(path: Path, text: str) -> None:
  """Writes a file that is whole or not there."""
  with replacing.file(path) as begun:
    begun.write_text(text + '\n', encoding='utf-8')


class Target:
  """A target, and what drafts for it as `--drafters` names it."""

  def __init__(
    self, args: argparse.Namespace, name: str, drafters: Sequence[str]
  ):
    self.args, self.name, self.drafters = args, name, drafters
    self.folder, self.key = local_path(args.out), jax.random.key(args.seed)
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
    self, sets: Mapping[str, Sequence[Example]]
  ) -> tuple[dict[str, Ids], list[str]]:
    """Token ids of each category that fits, and a sentence on the others."""
    args, vocabulary = self.args, self.alone.vocabulary
    is_translator = families.has_encoder(self.alone.config)
    names = args.categories or [*sets, CONTROL]
    found: dict[str, Ids] = {}
    for name in names:
      if name == CONTROL:
        ids = set(range(vocabulary.vocab_size)) - vocabulary.special_ids
        rows = suite_prompts.random_tokens(sorted(ids), args.suite_prompts)
      elif is_translator and name != TRANSLATION:
        continue
      else:
        rows = prompts.encode(
          vocabulary,
          [
            suite_prompts.shown(example, is_translator)
            for example in sets[name][: args.suite_prompts]
          ],
          config=self.alone.config,
          is_chat=vocabulary.chat_template is not None,
        )
      num_new = 0 if is_translator else args.suite_tokens
      if max(map(len, rows)) + num_new <= self.alone.max_positions:
        found[name] = rows
    missing = ', '.join(name for name in names if name not in found)
    note = f'Left out for {self.name}, which they do not fit: {missing}.'
    return found, [note] if missing else []

  def measure(
    self, ids: Mapping[str, Ids], temperature: float, batch_size: int
  ) -> list[Row]:
    """The rows of all categories; those that are in the folder are read."""
    shapes = widths({name: max(map(len, rows)) for name, rows in ids.items()})
    baseline, cells = '', {}
    for width in sorted(set(shapes.values())):
      programs = None
      for name in (name for name in ids if shapes[name] == width):
        setting = {
          'target': self.name,
          'category': name,
          'temperature': temperature,
          'batch_size': batch_size,
        }
        file = re.sub(r'[^\w.-]+', '_', '-'.join(map(str, setting.values())))
        path = self.folder / 'cells' / f'{file}.json'
        if not path.exists():
          batches = self._batches(ids[name], width, batch_size)
          baseline = baseline or self._fastest(batches[0], temperature)
          programs = programs or self._compile(
            batches[0], temperature, baseline
          )
          rows = self._rows(programs, batches, setting | {'plain': baseline})
          write(path, json.dumps(rows, indent=1))
        cells[name] = json.loads(path.read_text(encoding='utf-8'))
    return [row for name in ids for row in cells[name]]

  def _rows(
    self, programs: Programs, batches: Sequence[Prompt], setting: Row
  ) -> list[Row]:
    """Measures a cell."""
    title = f'{self.name}, {setting["category"]}'
    with progress.bar(title, len(batches)) as bar:
      timed, costs = programs.measure(
        batches,
        repeats=self.args.suite_repeats,
        is_greedy=not setting['temperature'],
        advance=bar.advance,
      )
    return [
      {**setting, 'drafter': key[0], 'gamma': key[1]}
      | suite.figures(timed, key, costs.get(key, {}), self.args.dtype)
      | {'compile_seconds': programs.compile_seconds}
      for key in timed
      if key not in (PLAIN, BASELINE)
    ]

  def _batches(self, ids: Ids, width: int, batch_size: int) -> list[Prompt]:
    found = []
    for start in range(0, len(ids), batch_size):
      part = ids[start : start + batch_size]
      batch = prompts.pack(
        [*part, *[None] * (batch_size - len(part))],
        config=self.alone.config,
        width=width,
        max_new_tokens=self.args.suite_tokens,
        row_ids=range(start, start + batch_size),
      )
      found.append(jax.tree.map(jnp.asarray, batch))
    return found

  def _compile(
    self, prompt: Prompt, temperature: float, baseline: str
  ) -> Programs:
    """All ways of decoding batches of the shape of one."""
    ways: dict[Any, Way] = {PLAIN: self._plain(self.args.dtype, temperature)}
    if baseline != self.args.dtype:
      ways[BASELINE] = self._plain(baseline, temperature)
    for text in self.drafters:
      kind, _, model = text.partition('=')
      for gamma in [0] if DRAFTERS[kind] is NoDrafter else self.args.gammas:
        ways[model or kind, gamma] = self._way(kind, model, gamma, temperature)
    with progress.waiting(f'compiling for {self.name}', notice_after=30):
      return Programs(ways, self.key, prompt, self._max_len(prompt))

  def _sampling(self, temperature: float) -> Sampling:
    limits = {
      name: getattr(self.args, name) if temperature else None
      for name in ('top_k', 'top_p', 'min_p')
    }
    return Sampling(temperature=temperature, **limits)

  def _plain(self, dtype: str, temperature: float) -> Way:
    alone = self.plain[dtype]
    sampled = self._sampling(temperature).to_probs(alone.vocabulary.vocab_size)
    return Way(
      params=alone.params,
      target=alone.target,
      rule={'logits_to_probs': sampled, 'eos_id': alone.eos_id},
      prefill='' if dtype == self.args.dtype else dtype,
    )

  def _way(self, kind: str, model: str, gamma: int, temperature: float) -> Way:
    """Speculative decoding by one drafter."""
    args = self.args
    fixed: dict[str, Any] = {}
    given = {flag: getattr(args, flag) for flag in flags_of(DRAFTERS[kind])}
    if model:
      dtype = args.draft_dtype or args.dtype
      fixed['model'] = Model(checkpoint=model, dtype=dtype)
    if kind == 'ngram':
      fixed['text'] = args.ngram_text or str(self.folder / NGRAM_TEXT)
      fixed['is_sampled'] = bool(temperature)
    given |= {'gamma': gamma}
    made = decoder_lib.outline(
      self.alone.model,
      drafter=chosen('drafter', DRAFTERS, kind, given, **fixed),
      rule=chosen('verification', RULES, args.verification, vars(args)),
      sampling=self._sampling(temperature),
    )
    drafted, target = made.drafting, self.alone.params.target
    if drafted.config is not None and model not in self.weights:
      with progress.waiting(f'loading {model}'):
        self.weights[model] = models.read_params(fixed['model'], drafted.config)
    own = drafted.join(target, self.weights.get(model, ()))
    return Way(Params(target, own), made.target, made.rule, made.drafter, model)

  def _fastest(self, prompt: Prompt, temperature: float) -> str:
    """The dtype in which plain decoding is fastest."""
    if len(self.plain) == 1:
      return self.args.dtype
    candidates = {}
    with progress.waiting(f'plain decoding of {self.name}', notice_after=30):
      for dtype in self.plain:
        way = self._plain(dtype, temperature)
        rule: Row = {'target': way.target, 'max_len': self._max_len(prompt)}
        candidates[dtype] = sides.plain_side(
          way.params, self.key, [prompt], **rule, **way.rule
        )
    return sides.fastest(candidates)[0]

  def _max_len(self, prompt: Prompt) -> int:
    return prompt.decoder_tokens.shape[1] + self.args.suite_tokens
