"""Collects what the experiments wrote in experiments/RESULTS.md.

    python -m experiments.results [--check]

It also writes the speeds of README.md. `--check` writes nothing and names the
quoted figures that are older than the code that they measure. The page shows
every table of `experiments/*/results/*.json` with the command that made it, the
device and the date; nothing is measured here. A folder in `results` has the
tables of another device or setting, and gets a chapter of its own.
"""

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from experiments import report, summary

ROOT = Path(__file__).resolve().parent
PAGE = ROOT / 'RESULTS.md'
FRONT = ROOT.parent / 'README.md'
_BEGIN, _END = '<!-- speeds -->', '<!-- end of speeds -->'
_MEASURE = 'run python -m experiments.quoted on an idle machine'
_WRITE = 'run python -m experiments.results'
TITLES = {
  'quoted': 'Speeds that the first pages quote',
  'peers': 'Other systems, side by side',
  'audit': 'Samplers of engines, audited',
  'accelerator': 'What decoding costs',
  'plain_step': "Where a plain step's time goes",
  'quantized': 'Quantised weights, and targets that draft for themselves',
  'predicted': 'Predictions for TPUs',
  'grammar': 'Texts that match a grammar',
  'trees': 'Trees of drafts beside chains',
  'leviathan2023': 'Leviathan et al. 2023: speculative decoding',
  'sun2024': 'Sun et al. 2024: block verification',
  'xia2023': 'Xia et al. 2023: SpecDec',
  'block': 'Block drafters beside other drafters',
  'beams': 'Speculative beam search',
  'suffix': 'Drafts from earlier outputs',
  'rollouts': 'Rollouts of GRPO, by Tunix and speculative',
}
# Of a folder, in this order; others follow by name.
_ORDER = {
  'leviathan2023': (
    *(f'table_{number}' for number in range(1, 6)),
    *('predictions', 'adaptive', 'figures'),
  ),
  'block': ('comparison', 'shipped', 'speed', 'predicted'),
  'trees': ('ranks', 'speed', 'accelerators'),
  'xia2023': ('main', 'block_size', 'drafters', 'verification', 'positions'),
}
_HEAD = '# Tables of results\n'
_READING = """\
## How to read this page

`make tables` runs the commands of the three papers below and then
`python -m experiments.results`, which writes this page. Values from a paper are
marked (P) if they were read in the paper or in its authors' code, and (S) if
from another source. If the code of a table has changed since it was measured,
the table has a line "age". Times are from the machine that each table names. A
chapter whose title ends with a setting is a separate run, on another machine.
"""


def main(argv: Sequence[str] | None = None) -> int:
  parser = argparse.ArgumentParser(prog='python -m experiments.results')
  parser.add_argument('--check', action='store_true', help='write nothing')
  if parser.parse_args(argv).check:
    found = check(ROOT, FRONT.read_text('utf-8'), PAGE.read_text('utf-8'))
    print('\n'.join(found) or 'all quoted figures are of this code')
    return min(len(found), 1)
  PAGE.write_text(page(ROOT), encoding='utf-8')
  FRONT.write_text(front(ROOT, FRONT.read_text('utf-8')), encoding='utf-8')
  print(f'wrote {PAGE.name} and {FRONT.name}')
  return 0


def check(root: Path, front_page: str, results_page: str) -> list[str]:
  """Names quoted figures that are not of the current code, in sentences."""
  found = []
  path = root / summary.QUOTED
  if not path.exists():
    found.append(f'{summary.QUOTED} is missing: {_MEASURE}')
  elif age := report.age(json.loads(path.read_text('utf-8'))):
    found.append(f'{summary.QUOTED} is {age}: {_MEASURE}')
  if front(root, front_page) != front_page:
    found.append(f'the speeds of {FRONT.name} differ from it: {_WRITE}')
  quoted = results_page.partition(_READING)[0]
  if quoted != page(root).partition(_READING)[0]:
    found.append(f'the first lines of {PAGE.name} differ from it: {_WRITE}')
  return found


def front(root: Path, text: str) -> str:
  """README.md with its speeds between two comments."""
  before, begin, rest = text.partition(_BEGIN)
  _, end, after = rest.partition(_END)
  if not end:
    raise ValueError(f'{FRONT.name} has no {_BEGIN} and {_END}')
  return f'{before}{begin}\n{summary.front(root)}{end}{after}'


def page(root: Path) -> str:
  """The whole page, of the experiments in a folder."""
  parts = [_HEAD, *filter(None, [summary.lines(root)]), _READING]
  for name, title in TITLES.items():
    results = root / name / 'results'
    for folder in (results, *sorted(results.glob('*/'))):
      found = _tables(folder, _ORDER.get(name, ()))
      if found:
        apart = '' if folder == results else f', {folder.name}'
        parts.append(f'## {title}{apart}\n')
      link = f'{folder.relative_to(root)}/'
      parts += [
        report.markdown(contents, level=3, folder=link) for contents in found
      ]
  return '\n'.join(parts)


def _tables(folder: Path, order: tuple[str, ...]) -> list[dict[str, Any]]:
  def place(path: Path) -> tuple[int, str]:
    known = path.stem in order
    return order.index(path.stem) if known else len(order), path.stem

  paths = sorted(folder.glob('*.json'), key=place)
  found = [json.loads(path.read_text(encoding='utf-8')) for path in paths]
  return [
    contents | {'age': age} if (age := report.age(contents)) else contents
    for contents in found
  ]


if __name__ == '__main__':
  raise SystemExit(main())
