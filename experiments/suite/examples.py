"""Prompts by category: those of the suite, and of public sets.

An example has a "prompt" and may have a "text" that it is about.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from specdec_jax.files import text_lines
from specdec_jax.files.paths import user_path

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
# Files of public sets, qualitative ones alone, by where they may be.
PUBLIC = {
  'Spec-Bench': ('question.jsonl', 'data/spec_bench/question.jsonl'),
  'SPEED-Bench': ('qualitative.jsonl',),
}
# For the translator, all alike.
SENTENCES = [
  f'This package contains the {part} of the {name} library.'
  for part in ('documentation', 'header files', 'shared objects', 'examples')
  for name in ('video', 'sound', 'font')
]
_PLACEHOLDER = 'FULL BENCHMARK DATA SHOULD BE FETCHED'


def shown(example: Example, is_translator: bool) -> str:
  """Returns what a model reads; a translator the text alone, if there is
  one."""
  if is_translator:
    return example.get('text', example['prompt'])
  return '\n\n'.join(example.values())


def own() -> dict[str, list[Example]]:
  """Reads twenty examples of each category but the control."""
  folder = Path(__file__).parent / 'prompts'
  files = {n: folder / f'{n.replace(" ", "_")}.jsonl' for n in CATEGORIES[:-1]}
  return {
    name: [example for _, example in text_lines.read_objects(path)]
    for name, path in files.items()
  }


def random_tokens(ids: Sequence[int], num_rows: int) -> list[list[int]]:
  """Draws the rows of the control, always the same, evenly from `ids`."""
  rng = np.random.default_rng(0)
  return rng.choice(ids, (num_rows, _CONTROL_LENGTH)).tolist()


def public(name: str, folder: str) -> dict[str, list[Example]]:
  """Reads a public set: the first turn of each question, under the names of the
  set and of its category.

  Args:
    name: one of `PUBLIC`.
    folder: a clone of https://github.com/hemingkx/Spec-Bench, or where its
      question.jsonl is; of https://huggingface.co/datasets/nvidia/SPEED-Bench,
      where its preparation for NeMo-Skills wrote qualitative.jsonl.

  Raises:
    ValueError: if there is no such file, a line is malformed, or its text was
      not fetched.
  """
  paths = [user_path(folder) / each for each in PUBLIC[name]]
  path = next((each for each in paths if each.is_file()), None)
  if path is None:
    raise ValueError(f'{folder} is no {name}: it has no {paths[0].name}')
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
