"""The comparison of block drafters with others: its runs and its texts."""

import json
from importlib import util

import pytest

from experiments.block import __main__ as block
from experiments.block import measuring, recipes, training
from specdec_jax.assembly.drafters import DRAFTERS


def test_a_step_takes_the_median_of_the_log(tmp_path):
  """Lines of its log in which programs were compiled do not count."""
  lines = [
    # 10 steps of 100 targets each: 60 s with compilation, then 20 and 30 s.
    {'step': 10, 'targets': 1000, 'targets_per_processor_second': 1000 / 60},
    {'step': 20, 'targets': 1000, 'targets_per_processor_second': 50.0},
    {'step': 30, 'targets': 900, 'targets_per_processor_second': 30.0},
    {'step': 30, 'validation_nats': 2.0},
  ]
  text = ''.join(json.dumps(line) + '\n' for line in lines)
  (tmp_path / 'metrics.jsonl').write_text(text)
  assert training.seconds_per_step(tmp_path) == pytest.approx(3.0)


def test_texts_are_of_the_test_split_and_the_suite(tmp_path):
  split = tmp_path / 'debian_ende'
  split.mkdir()
  records = [{'inputs': f'text {i}', 'targets': ''} for i in range(1000)]
  text = ''.join(json.dumps(record) + '\n' for record in records)
  (split / 'test.jsonl').write_text(text)
  files = measuring.test_prompts(tmp_path, tmp_path / 'prompts')
  read = lambda name: [
    json.loads(line)['prompt'] for line in files[name].read_text().splitlines()
  ]
  sentences = read('ende-mini')
  assert len(set(sentences)) == 256
  assert (sentences[0], sentences[-1]) == ('text 0', 'text 999')
  assert len(set(read('smollm2-135m'))) == 40
  assert set(files) == set(recipes.TARGETS)


@pytest.mark.parametrize('name', recipes.TARGETS)
def test_recipes_can_be_run(name):
  """Drafters, gin files and the sources of weights exist."""
  target = recipes.TARGETS[name]
  for recipe in target.recipes.values():
    assert recipe.drafter in DRAFTERS
    source = target.recipes.get(recipe.weights_of, recipe)
    is_file = source.training.endswith('.gin')
    path = block.results.ROOT.parent / source.training
    assert path.is_file() if is_file else util.find_spec(source.training)


def test_the_figure_has_a_line_for_each_drafter(tmp_path):
  rates = {'alpha_by_position': [0.6, 0.5, 0.4, 0.3, 0.0, 0.0]}
  curves = {('ende-mini', 'one'): rates, ('smollm2-135m', 'two'): rates}
  block._draw(curves, tmp_path / 'positions.svg')
  text = (tmp_path / 'positions.svg').read_text()
  assert all(name in text for name in ('ende-mini', 'smollm2-135m', 'one'))
