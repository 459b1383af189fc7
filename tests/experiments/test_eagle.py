"""Prompts for the text that an EAGLE-3 drafter learns from."""

import json
import re

import pytest

from experiments.eagle import prompts
from experiments.suite import examples


@pytest.fixture(scope='module')
def corpora(tmp_path_factory):
  folder = tmp_path_factory.mktemp('corpora')
  passages = [
    {'inputs': f'Program {i} reads what is written. ' * 8, 'group': str(i)}
    for i in range(60)
  ]
  pairs = [
    {
      'inputs': f'Sentence {i} is about the weather of a summer.',
      'targets': f'Satz {i} handelt vom Wetter.',
    }
    for i in range(60)
  ]
  for name, records in (('debian_synopsis', passages), ('debian_ende', pairs)):
    (folder / name).mkdir()
    lines = [json.dumps(record) + '\n' for record in records]
    (folder / name / 'train.jsonl').write_text(''.join(lines))
  return folder


def test_prompts_are_many_and_none_is_a_test_prompt(corpora, tmp_path):
  def make(name, seed):
    path = tmp_path / name
    arguments = f'--corpora={corpora} --out={path} --count=700 --seed={seed}'
    assert prompts.main(arguments.split()) == 0
    return path.read_text()

  text = make('a.jsonl', 0)
  assert make('b.jsonl', 0) == text
  assert make('c.jsonl', 1) != text
  found = [json.loads(line) for line in text.splitlines()]
  assert len(found) > 600
  assert len({each['category'] for each in found}) == 8
  texts = [each['prompt'] for each in found]
  assert len(set(texts)) == len(texts)
  # Every slot has been filled.
  assert not [t for t in texts if re.search(r'\{[A-Za-z]+\}', t)]
  suite = [
    examples.shown(example, is_translator=False)
    for category in examples.own().values()
    for example in category
  ]
  assert not {*texts} & {*suite}


def test_what_the_suite_has_is_left_out():
  example = examples.own()['chat'][0]['prompt']
  assert prompts.runs_of_words(f'Please: {example}') & prompts.of_suite()
  assert not prompts.runs_of_words('What do otters eat in winter, and why?') & (
    prompts.of_suite()
  )
