"""Writes prompts like those of the benchmark suite, none of which it has.

    python -m experiments.eagle.prompts --corpora=corpora --count=6000 \
      --out=prompts.jsonl

A prompt is a template of templates.txt whose slots are filled with words of
words.txt, with snippets of code, and with sentences and descriptions of
Debian's packages from `python -m experiments.corpora debian`. The same seed
gives the same file. Prompts that equal one of the suite, or share six
consecutive words with one, are left out.
"""

import argparse
import collections
import functools
import json
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np

from experiments.suite import examples
from specdec_jax.files import replacing, text_lines
from specdec_jax.launch.numbers import positive_int

_HERE = Path(__file__).parent
_HEADING = re.compile(r'\[(?P<name>[a-z_ ]+?)(?: (?P<share>\d+))?\]')
_SLOT = re.compile(r'\{(\w+)\}')
# Words in a row that a prompt may not share with one of the suite.
_SHARED = 6
# Of a description that is used whole, and of one among others.
_PASSAGE_CHARACTERS = 250, 700
_SENTENCE_CHARACTERS = 40, 160

Lists = Mapping[str, Sequence[str]]


def sections(name: str) -> dict[tuple[str, int], list[str]]:
  """Lines of a file beside this one, by heading and its share."""
  found: dict[tuple[str, int], list[str]] = {}
  for line in (_HERE / name).read_text(encoding='utf-8').splitlines():
    if match := _HEADING.fullmatch(line):
      lines = found.setdefault((match['name'], int(match['share'] or 0)), [])
    elif line and not line.startswith('#'):
      lines.append(line)
  return found


def words() -> dict[str, list[str]]:
  """What slots are filled with, by slot."""
  return {
    name: [item.strip() for line in lines for item in line.split('|')]
    for (name, _), lines in sections('words.txt').items()
  }


def corpus(folder: str) -> dict[str, list[str]]:
  """Passages and sentences, English and German, of Debian's corpora."""
  read = lambda name: (
    record
    for _, record in text_lines.read_objects(
      Path(folder) / name / 'train.jsonl'
    )
  )
  passages: dict[str, str] = {}
  sentences: dict[str, str] = {}
  german: dict[str, str] = {}
  low, high = _PASSAGE_CHARACTERS
  for record in read('debian_synopsis'):
    text = str(record['inputs'])
    if low <= len(text) <= high and text.isascii():
      # One of each group: packages of one source say the same.
      passages.setdefault(record['group'], text)
  low, high = _SENTENCE_CHARACTERS
  for record in read('debian_ende'):
    text, other = str(record['inputs']), str(record['targets'])
    if low <= len(text) <= high and text.isascii() and text.endswith('.'):
      # The first words tell apart what differs in a name.
      sentences.setdefault(' '.join(text.split()[:4]), text)
      german.setdefault(' '.join(other.split()[:4]), other)
  return {
    'passage': list(passages.values()),
    'sentence': list(sentences.values()),
    'german': list(german.values()),
  }


class Maker:
  """Fills templates."""

  def __init__(self, lists: Lists, generator: np.random.Generator):
    self.lists = lists
    self.generator = generator
    number = lambda low, high: str(generator.integers(low, high))
    self.made: Mapping[str, Callable[[], str]] = {
      'few': lambda: number(2, 10),
      'tens': lambda: number(11, 100),
      'hundreds': lambda: number(101, 1000),
      'letter': lambda: self.pick(list('aeiost')),
      'sentences': lambda: self.several('sentence', 2, 4),
      'typos': lambda: self.typos(self.several('sentence', 1, 3)),
      'bare': lambda: re.sub(
        '[.,;:]', '', self.several('sentence', 2, 4)
      ).lower(),
      'shuffled': self.shuffled,
      'story': self.story,
      'notice': self.notice,
      'text': self.text,
    }

  def pick(self, items: Sequence[str]) -> str:
    return items[self.generator.integers(len(items))]

  def several(self, slot: str, low: int, high: int) -> str:
    count = self.generator.integers(low, high)
    return ' '.join(self.pick(self.lists[slot]) for _ in range(count))

  def fill(self, template: str) -> str:
    """The template, each slot filled anew; a slot with a capital letter gives
    its words one."""

    def value(match: re.Match) -> str:
      slot = match[1].lower()
      made = self.made.get(slot)
      text = made() if made else self.pick(self.lists[slot])
      is_capital = match[1] != slot
      return text[0].upper() + text[1:] if is_capital else text

    return _SLOT.sub(value, template.replace('\\n', '\n'))

  def typos(self, text: str) -> str:
    """With a letter left out or doubled in every fifth word or so."""
    changed = []
    for word in text.split():
      at = int(self.generator.integers(1, max(len(word) - 1, 2)))
      if len(word) > 3 and self.generator.random() < 0.25:
        is_lost = self.generator.random() < 0.5
        word = word[:at] + ('' if is_lost else word[at]) + word[at + is_lost :]
      changed.append(word)
    return ' '.join(changed)

  def shuffled(self) -> str:
    sentences = re.split(r'(?<=\.) ', self.story())
    return ' '.join(self.generator.permutation(sentences))

  def story(self) -> str:
    """A few sentences about people who do ordinary things."""
    lines = self.generator.permutation(self.lists['story_line'])[:5]
    first, second = self.generator.permutation(self.lists['name'])[:2]
    return ' '.join(
      self.fill(line.replace('{A}', first).replace('{B}', second))
      for line in lines
    )

  def notice(self) -> str:
    """Opening hours, prices and rules of a place."""
    lines = self.generator.permutation(self.lists['notice_line'])[:5]
    opening = 'The {shop} in {city} is open every day.'
    return ' '.join(self.fill(line) for line in (opening, *lines))

  def text(self) -> str:
    """A passage, a story, a notice, or several sentences."""
    kind = self.generator.random()
    if kind < 0.5:
      return self.pick(self.lists['passage'])
    if kind < 0.7:
      return self.story()
    return self.notice() if kind < 0.85 else self.several('sentence', 3, 6)


def runs_of_words(text: str) -> set[tuple[str, ...]]:
  """All runs of `_SHARED` words."""
  found = re.findall(r'\w+', text.lower())
  return {
    tuple(found[i : i + _SHARED]) for i in range(len(found) - _SHARED + 1)
  }


@functools.cache
def of_suite() -> frozenset[tuple[str, ...]]:
  """The runs of the suite's prompts; a short prompt is one run. What their
  instructions say is no text of a test: those of categories with texts are
  left out."""
  runs: set[tuple[str, ...]] = set()
  for category in examples.own().values():
    for example in category:
      own = example.get('text', example['prompt'])
      runs |= runs_of_words(own) or {tuple(re.findall(r'\w+', own.lower()))}
  return frozenset(runs)


def make(lists: Lists, *, count: int, seed: int) -> list[dict[str, str]]:
  """Prompts with their categories, in random order."""
  generator = np.random.Generator(np.random.Philox(seed))
  maker = Maker(lists, generator)
  templates = sections('templates.txt')
  total = sum(share for _, share in templates)
  seen: set[tuple[str, ...]] = set()
  found: list[dict[str, str]] = []
  for (category, share), lines in templates.items():
    wanted, kept, tries = count * share // total, 0, 0
    while kept < wanted and tries < 20 * wanted:
      tries += 1
      prompt = maker.fill(lines[tries % len(lines)])
      own = tuple(re.findall(r'\w+', prompt.lower()))
      runs = runs_of_words(prompt) | {own}
      if own in seen or runs & of_suite():
        continue
      seen.add(own)
      kept += 1
      found.append({'prompt': prompt, 'category': category})
  return [found[i] for i in generator.permutation(len(found))]


def main(argv: Sequence[str] | None = None) -> int:
  parser = argparse.ArgumentParser(prog='python -m experiments.eagle.prompts')
  parser.add_argument('--corpora', required=True, help='of experiments.corpora')
  parser.add_argument('--out', required=True, help='the .jsonl to write')
  parser.add_argument('--count', type=positive_int, default=6000)
  parser.add_argument('--seed', type=int, default=0)
  args = parser.parse_args(sys.argv[1:] if argv is None else argv)
  snippets = (_HERE / 'snippets.txt').read_text(encoding='utf-8')
  lists = {
    **words(),
    **corpus(args.corpora),
    'code': snippets.rstrip('\n').split('\n---\n'),
  }
  prompts = make(lists, count=args.count, seed=args.seed)
  with replacing.file(args.out) as partial:
    lines = [json.dumps(each, ensure_ascii=False) + '\n' for each in prompts]
    partial.write_text(''.join(lines), encoding='utf-8')
  counts = collections.Counter(each['category'] for each in prompts)
  print(f'{args.out}: {len(prompts)} prompts, {dict(counts)}')
  return 0


if __name__ == '__main__':
  sys.exit(main())
