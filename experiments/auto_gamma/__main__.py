"""Compares the choice of `gamma='auto'` with the best gamma of a search.

  python -m experiments.corpora debian --out corpora/debian
  python -m experiments.auto_gamma --corpus=corpora/debian

In each of six settings, gamma is chosen `--repeats` times from scratch, and
then every gamma of the search decodes the same batches in turns. The best of
many is partly the best by chance: it is measured once more, beside the chosen
one. Settings that are already in `results.json` are not measured again, so a
stopped run continues.
"""

import argparse
import dataclasses
import functools
import itertools
import json
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

import specdec_jax
from experiments import common, report
from specdec_jax.assembly import auto_gamma, packing
from specdec_jax.assembly.decoder import Decoder
from specdec_jax.assembly.running import DecodeSettings
from specdec_jax.files import replacing
from specdec_jax.measure import stopwatch, trials
from specdec_jax.text.prompts import Batch

# Beside what is tried, and up to half as much again.
SEARCHED = (1, 2, 3, 4, 6, 8, 15, 23, 31)
PROMPTS = Path(__file__).parents[1] / 'prompts'


@dataclasses.dataclass(frozen=True, kw_only=True)
class Setting:
  """What is decoded.

  Attributes:
    model: the target.
    options: of `specdec_jax.load`, the drafter among them.
    texts: a file of prompts, or a corpus of `experiments.corpora`.
    field: the field of its lines.
    prefix: what is put before every text.
    num_characters: most of a text.
    is_chat: applies the chat template.
    batch_size: rows.
    num_batches: that the search decodes in a turn.
    max_new_tokens: per row.
  """

  model: str
  options: Mapping[str, Any]
  texts: str
  field: str = 'inputs'
  prefix: str = ''
  num_characters: int = 400
  is_chat: bool = False
  batch_size: int = 1
  num_batches: int = 24
  max_new_tokens: int = 48


ENDE = Setting(
  model='ende-mini', options={'draft_model': 'ende-nano'}, texts='debian_ende'
)
COPY = Setting(
  model='smollm2-135m',
  options={'drafter': 'prompt_lookup'},
  texts=str(PROMPTS / 'copy.jsonl'),
  field='prompt',
  num_characters=10**6,
  is_chat=True,
  num_batches=6,
)
SETTINGS = {
  'ende-mini, batch 1': ENDE,
  'ende-mini, batch 32': dataclasses.replace(
    ENDE, batch_size=32, num_batches=2
  ),
  'lm-mini': Setting(
    model='lm-mini',
    options={'draft_model': 'lm-nano'},
    texts='debian_lm',
    field='text',
    num_characters=60,
  ),
  'synopsis': dataclasses.replace(
    ENDE,
    texts='debian_synopsis',
    prefix='summarize: ',
    max_new_tokens=32,
  ),
  'SmolLM2, copy': COPY,
  'SmolLM2, chat': dataclasses.replace(COPY, texts=str(PROMPTS / 'chat.jsonl')),
}


def texts_of(setting: Setting, corpus: Path) -> list[str]:
  """As many texts as the search decodes, evenly from the file."""
  path = Path(setting.texts)
  if not path.suffix:
    path = corpus / setting.texts / 'test.jsonl'
  lines = path.read_text(encoding='utf-8').splitlines()
  count = setting.batch_size * setting.num_batches
  places = np.linspace(0, len(lines) - 1, min(count, len(lines))).astype(int)
  texts = [json.loads(lines[i])[setting.field] for i in places]
  return [setting.prefix + text[: setting.num_characters] for text in texts]


def measure(setting: Setting, corpus: Path, repeats: int) -> dict[str, Any]:
  """The choices and the search's speeds, in tokens per second."""
  auto = specdec_jax.load(setting.model, gamma='auto', **setting.options)
  settings = DecodeSettings(
    max_new_tokens=setting.max_new_tokens,
    batch_size=setting.batch_size,
    chat=setting.is_chat,
  )
  batches = packing.pack(auto, texts_of(setting, corpus), settings)
  tried = auto.tried_gammas
  size = trials.num_batches_of_turn(settings.num_rows)
  many = size * trials.num_turns(tried)
  choices = []
  for repeat in range(repeats):
    several = list(itertools.islice(shuffled(batches, repeat), many))
    choice, _ = auto_gamma.choose(auto, several, settings)
    choices.append(choice)
    print(f'  {choice.sentence}', file=sys.stderr, flush=True)
  gammas = {gamma for gamma in SEARCHED if gamma <= 1.6 * max(tried)}
  chosen = [choice.gamma for choice in choices]
  speeds = search(
    auto, sorted(gammas | {*tried, *chosen}), batches, settings, repeats
  )
  best = max(speeds, key=speeds.__getitem__)
  final = search(
    auto, sorted({0, best, *chosen}), batches, settings, 2 * repeats
  )
  return {
    'chosen': chosen,
    'sentences': [choice.sentence for choice in choices],
    'tried': tried,
    'best': best,
    'tokens_per_second': {str(gamma): each for gamma, each in speeds.items()},
    'measured_again': {str(gamma): each for gamma, each in final.items()},
    **compared(speeds | final, best, chosen),
  }


def shuffled(batches: Sequence[Batch], seed: int) -> Iterator[Batch]:
  """The batches without an end, each time in another order, so that no gamma
  always gets the same of them."""
  rng = np.random.default_rng(seed)
  while True:
    yield from (batches[i] for i in rng.permutation(len(batches)))


def search(
  auto: Decoder,
  gammas: Sequence[int],
  batches: Sequence[Batch],
  settings: DecodeSettings,
  repeats: int,
) -> dict[int, float]:
  """Tokens per second of every gamma: of each batch the median of `repeats`
  turns, in which the gammas follow each other batch by batch."""
  compiled = lambda gamma: auto_gamma.compile_parts(
    auto.at(gamma), batches[0], settings
  )
  decodes = stopwatch.together(
    {gamma: functools.partial(compiled, gamma) for gamma in gammas}
  )
  seconds = {gamma: np.zeros((repeats, len(batches))) for gamma in gammas}
  tokens = dict.fromkeys(gammas, 0)
  for turn in range(repeats):
    for i, batch in enumerate(batches):
      for gamma, decode in decodes.items():
        visit = decode(batch)[1]
        seconds[gamma][turn, i] = visit.fill_seconds + visit.loop_seconds
        if not turn:
          tokens[gamma] += int(visit.statistics.num_tokens.sum())
  return {
    gamma: tokens[gamma] / float(np.median(each, axis=0).sum())
    for gamma, each in seconds.items()
  }


def compared(
  speeds: Mapping[int, float],
  best: int,
  chosen: Sequence[int],
) -> dict[str, Any]:
  """The choices' speed over that of the best gamma and over plain decoding's,
  medians; and over plain decoding's in the shortest run that is measured, for
  which that takes a share of the time, the least."""
  share = trials.SHARE
  whole = [1 / (share / speeds[0] + 1 / speeds[gamma]) for gamma in chosen]
  median = lambda other: float(
    np.median([speeds[gamma] / speeds[other] for gamma in chosen])
  )
  return {
    'of_best': median(best),
    'of_plain': median(0),
    'of_plain_with_measuring': float(min(whole) / speeds[0]),
  }


def table(results: Mapping[str, Any]) -> str:
  """Markdown."""
  lines = [
    '| setting | chosen | best | plain | chosen, of the best | of plain | of '
    'plain, measuring included |',
    '|---|---|---|---|---|---|---|',
  ]
  for name, found in results['settings'].items():
    speeds, best = found['measured_again'], found['best']
    chosen = ', '.join(map(str, found['chosen']))
    ratios = ('of_best', 'of_plain', 'of_plain_with_measuring')
    cells = [
      name,
      chosen,
      f'{best} ({speeds[str(best)]:.1f} tokens/s)',
      f'{speeds["0"]:.1f} tokens/s',
      *(f'{found[ratio]:.3f}' for ratio in ratios),
    ]
    lines.append(f'| {" | ".join(cells)} |')
  return '\n'.join([f'{results["device"]}, float32.', '', *lines]) + '\n'


def run(args: argparse.Namespace) -> None:
  """Measures what is missing, and writes everything."""
  args.output.mkdir(parents=True, exist_ok=True)
  path = args.output / 'results.json'
  results = now = {'device': stopwatch.device_name(), **report.of_code()}
  now['settings'] = {}
  if path.exists():
    results = json.loads(path.read_text(encoding='utf-8'))
  for name in args.settings:
    if name not in SETTINGS:
      raise ValueError(f'--settings {name!r} is none of {"; ".join(SETTINGS)}')
  for name in args.settings:
    if name in results['settings']:
      continue
    for what in ('device', 'code'):
      if results.get(what) != now[what]:
        raise ValueError(
          f'{path} is of {what} {results.get(what)}, not {now[what]}: give '
          'another --output'
        )
    started = time.perf_counter()
    print(name, file=sys.stderr, flush=True)
    found = measure(SETTINGS[name], args.corpus, args.repeats)
    found['measured_seconds'] = time.perf_counter() - started
    results['settings'][name] = found
    for file, text in (
      (path, json.dumps(results, indent=2) + '\n'),
      (args.output / 'auto_gamma.md', table(results)),
    ):
      with replacing.file(file) as partial:
        partial.write_text(text, encoding='utf-8')
  print(table(results))


def main(argv: Sequence[str] | None = None) -> int:
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument('--corpus', type=Path, default='corpora/debian')
  parser.add_argument(
    '--output', type=Path, default='experiments/auto_gamma/results'
  )
  parser.add_argument(
    '--settings',
    type=lambda text: text.split(';'),
    default=[*SETTINGS],
    help=f'of {"; ".join(SETTINGS)} (default: all)',
  )
  common.add_counts(parser, repeats=5)
  args = parser.parse_args(argv)
  return common.finish('auto_gamma', lambda: run(args))


if __name__ == '__main__':
  sys.exit(main())
