"""Prompts by category: those of the benchmark suite, and of public sets.

An example has a "prompt" and may have a "text" that it is about.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from specdec_jax.files import text_lines
from specdec_jax.files.local_path import local_path

Example = Mapping[str, str]

TRANSLATION = 'translation'
# Token ids drawn evenly, instead of a text.
CONTROL = 'random tokens'
CATEGORIES = (
  *('chat', 'coding', 'maths', 'question answering', 'summarisation'),
  *(TRANSLATION, 'rewriting', 'retrieval', 'long input', CONTROL),
)
# Ids of a row of the control.
_CONTROL_LENGTH = 64
# Categories of MT-bench, which Spec-Bench reports as one.
_MT_BENCH = (
  *('writing', 'roleplay', 'reasoning', 'math', 'coding', 'extraction'),
  *('stem', 'humanities'),
)
_PLACEHOLDER = 'FULL BENCHMARK DATA SHOULD BE FETCHED'


def shown(example: Example, is_translator: bool) -> str:
  """What a model reads; a translator the text alone, if there is one."""
  if is_translator:
    return example.get('text', example['prompt'])
  return '\n\n'.join(example.values())


def own() -> dict[str, list[Example]]:
  """Twenty examples of each category but the control."""
  folder = Path(__file__).parent / 'suite'
  files = {n: folder / f'{n.replace(" ", "_")}.jsonl' for n in CATEGORIES[:-1]}
  return {
    name: [example for _, example in text_lines.read_objects(path)]
    for name, path in files.items()
  }


def random_tokens(ids: Sequence[int], num_rows: int) -> list[list[int]]:
  """Rows of the control, always the same: ids drawn evenly from those given."""
  rng = np.random.default_rng(0)
  return rng.choice(ids, (num_rows, _CONTROL_LENGTH)).tolist()


def spec_bench(folder: str) -> dict[str, list[Example]]:
  """Spec-Bench by its tasks: the first turn of each question.

  Args:
    folder: a clone of https://github.com/hemingkx/Spec-Bench, or the folder of
      its question.jsonl.

  Raises:
    ValueError: if there is no such file, or a line is malformed.
  """
  path = local_path(folder) / 'question.jsonl'
  if not path.is_file():
    path = path.parent / 'data' / 'spec_bench' / path.name
  if not path.is_file():
    raise ValueError(f'{folder} is no Spec-Bench: it has no {path.name}')
  return _by_category('Spec-Bench', path)


def speed_bench(folder: str) -> dict[str, list[Example]]:
  """SPEED-Bench's qualitative split, by category: the first turn of each.

  Args:
    folder: where qualitative.jsonl is, which the preparation for NeMo-Skills
      writes (https://huggingface.co/datasets/nvidia/SPEED-Bench).

  Raises:
    ValueError: if there is no such file, a row is malformed, or its text was
      not fetched.
  """
  path = local_path(folder) / 'qualitative.jsonl'
  if not path.is_file():
    raise ValueError(f'{folder} is no SPEED-Bench: it has no {path.name}')
  return _by_category('SPEED-Bench', path)


def _by_category(name: str, path: Path) -> dict[str, list[Example]]:
  """The first turn of every row, under the name of the set and its category."""
  found: dict[str, list[Example]] = {}
  for place, row in text_lines.read_objects(path):
    turns = row.get('turns') or row.get('messages')
    if not isinstance(turns, list) or not turns:
      raise ValueError(
        f'{place} has no list "turns" or "messages"; {text_lines.keys_of(row)}'
      )
    turn = turns[0] if isinstance(turns[0], dict) else {'content': turns[0]}
    text = text_lines.text_under(turn, 'content', place)
    if _PLACEHOLDER in text:
      raise ValueError(
        f'{place} has a placeholder for its text: run the preparation that '
        f'{name} comes with, which fetches it'
      )
    category = text_lines.text_under(row, 'category', place)
    if category in _MT_BENCH and name == 'Spec-Bench':
      category = 'multi-turn'
    found.setdefault(f'{name} {category}', []).append({'prompt': text})
  return found
