"""Collects what the experiments wrote in docs/results.md.

    python -m experiments.results

Every table of `experiments/*/results/*.json` is shown with the command that
made it, the device and the date; nothing is measured here. A folder beneath
`results` has tables of another device or setting, and a chapter of its own.
"""

import json
from pathlib import Path
from typing import Any

from experiments import report, summary

ROOT = Path(__file__).resolve().parent
PAGE = ROOT.parent / 'docs' / 'results.md'
TITLES = {
  'prompts': 'SmolLM2-135M: prompt lookup',
  'peers': 'Other systems, side by side',
  'accelerator': 'What decoding costs',
  'plain_step': "Where a plain step's time goes",
  'trees': 'Trees of drafts beside chains',
  'leviathan2023': 'Leviathan et al. 2023: speculative decoding',
  'sun2024': 'Sun et al. 2024: block verification',
  'xia2023': 'Xia et al. 2023: SpecDec',
  'beams': 'Speculative beam search',
}
# Of a folder, in this order; others follow by name.
_ORDER = {
  'leviathan2023': (
    *(f'table_{number}' for number in range(1, 6)),
    *('predictions', 'adaptive', 'figures'),
  ),
  'trees': ('ranks', 'speed', 'accelerators'),
  'xia2023': ('main', 'block_size', 'drafters', 'verification'),
}
_HEAD = '# Results\n'
_READING = """\
## How to read this page

`make tables` runs the commands of the three papers below and then
`python -m experiments.results`, which writes this page. Values from a paper are
marked (P) if they were read in the paper or in its authors' code, and (S) if in
another source. Times are from the machine that is named with each table. A
chapter whose title ends with a setting is a run of its own, on another machine.
"""


def main() -> int:
  PAGE.write_text(page(ROOT), encoding='utf-8')
  print(f'wrote {PAGE.name}')
  return 0


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
      link = f'../experiments/{folder.relative_to(root)}/'
      parts += [
        report.markdown(contents, level=3, folder=link) for contents in found
      ]
  return '\n'.join(parts)


def _tables(folder: Path, order: tuple[str, ...]) -> list[dict[str, Any]]:
  def place(path: Path) -> tuple[int, str]:
    known = path.stem in order
    return order.index(path.stem) if known else len(order), path.stem

  paths = sorted(folder.glob('*.json'), key=place)
  return [json.loads(path.read_text(encoding='utf-8')) for path in paths]


if __name__ == '__main__':
  raise SystemExit(main())
