"""Gin files are found by their names, in any directory."""

import re

import pytest

pytest.importorskip('gin')

from specdec_jax.launch import gin_files, gin_launch
from tests.cli.tiny import assert_refused
from tests.infer.infer_runs import ROOT

# What runs/train.gin requires.
TRAIN = ("MODEL_DIR = 'mini'", "TOKENS = 'tokens'", "MODEL = 't5_mini'")
# What runs/infer.gin requires of a dry run.
INFER = (
  "--gin.MIXTURE_OR_TASK_NAME='task.jsonl'",
  "--gin.TASK_FEATURE_LENGTHS={'inputs': 4, 'targets': 4}",
  "--gin.CHECKPOINT_PATH='ende-nano'",
  "--gin.INFER_OUTPUT_DIR='out'",
  '--dry_run',
)


@pytest.fixture
def elsewhere(tmp_path, monkeypatch):
  """A working directory which Python's path has too, as a notebook's, with the
  folder that `specdec train` has written a model to."""
  monkeypatch.chdir(tmp_path)
  monkeypatch.syspath_prepend(tmp_path)
  (tmp_path / 'runs').mkdir()
  return tmp_path


def write(path, *lines) -> None:
  path.parent.mkdir(parents=True, exist_ok=True)
  path.write_text('\n'.join(lines))


def seed(*names, search_paths='.') -> str:
  """The seed that gin files for `specdec train` bind."""
  gin_launch.parse(
    gin_launch.Configuration(
      files=names,
      bindings=(*TRAIN, 'TRAIN_STEPS = 7'),
      folders=search_paths.split(','),
    )
  )
  return gin_launch.bindings()['SEED']


@pytest.mark.parametrize('prefix', ['', 'gin_configs/'])
def test_names_of_shipped_files_in_any_directory(run, elsewhere, prefix):
  write(
    elsewhere / 'mine.gin',
    f"include '{prefix}runs/infer.gin'",
    f"include '{prefix}drafters/prompt_lookup.gin'",
  )
  outcome = run('infer', '--model=as_stored', '--gin_file=mine.gin', *INFER)
  assert outcome.status == 0, outcome
  model = f'--gin_file={prefix}models/as_stored.gin'
  outcome = run('infer', model, f'--gin_file={prefix}runs/infer.gin', *INFER)
  assert outcome.status == 0, outcome


def test_own_files_go_before_shipped_ones(elsewhere):
  name = 'runs/train.gin'
  assert seed(name) == '0'
  # Of a Python package, as gin has them at last.
  write(elsewhere / 'package' / 'mine.gin', f"include '{name}'", 'SEED = 1')
  assert seed('package/mine.gin') == '1'
  write(
    elsewhere / 'folder' / name,
    "include 'gin_configs/runs/train.gin'",
    'SEED = 2',
  )
  assert seed(name) == '0'
  assert seed(name, search_paths=f'nowhere,{elsewhere}/folder') == '2'
  assert seed('package/mine.gin', search_paths='folder') == '1'
  write(elsewhere / name, "include 'gin_configs/runs/train.gin'", 'SEED = 3')
  assert seed(name, search_paths='folder') == '3'
  # What was searched before is not searched any more.
  assert seed('gin_configs/runs/train.gin') == '0'


def test_to_look_for_a_file_in_a_package_imports_nothing(elsewhere):
  write(elsewhere / 'outer' / '__init__.py', 'raise SystemExit')
  write(elsewhere / 'outer' / 'inner' / 'mine.gin')
  found = gin_files.find('outer/inner/mine.gin', [])
  assert found == elsewhere / 'outer' / 'inner' / 'mine.gin'


def test_shipped_files_include_shipped_files(elsewhere):
  for folder in ('', 'gin_configs/'):
    write(elsewhere / f'{folder}runs/train.gin', 'SEED = 4')
  assert seed('train/overfit_200.gin') == '0'


def test_a_model_of_ones_own_by_its_name(run, elsewhere):
  write(elsewhere / 'models' / 'mine.gin', "include 'models/as_stored.gin'")
  outcome = run('infer', '--model=mine', '--gin_file=runs/infer.gin', *INFER)
  assert outcome.status == 0, outcome


@pytest.mark.parametrize(
  ('flags', 'sentence'),
  [
    (
      ['--gin_file=runs/infr.gin'],
      'no file runs/infr.gin in {elsewhere}, {shipped}; did you mean '
      'runs/infer.gin?',
    ),
    (
      ['--gin_file=infer.gin', '--gin_search_paths=other'],
      'no file infer.gin in {elsewhere}, {elsewhere}/other, {shipped}; did you '
      'mean runs/infer.gin?',
    ),
    (
      ['--gin_file=gin_configs/model.gin'],
      'no file gin_configs/model.gin in {elsewhere}, {shipped}; did you mean '
      'drafters/model.gin?',
    ),
    (
      ['--gin_file=min.gin'],
      'no file min.gin in {elsewhere}, {shipped}; did you mean mine.gin?',
    ),
    (
      ['--gin_file={elsewhere}/mind.gin'],
      'no file {elsewhere}/mind.gin; did you mean {elsewhere}/mine.gin?',
    ),
    (
      ['--model=zzz', '--gin_file=runs/infer.gin'],
      'no file models/zzz.gin in {elsewhere}, {shipped}; there are '
      'models/as_stored.gin, models/gpt_97m.gin, ',
    ),
    (
      ['--gin_file=mine.gin'],
      'no file runs/infr.gin in {elsewhere}, {shipped}; did you mean '
      'runs/infer.gin? In file "{elsewhere}/mine.gin", line 1',
    ),
    (
      ['--gin_file=runs/infer.gin', '--gin.MIXTURE_OR_TASK_MODULE="not.there"'],
      "No module named 'not' In bindings string line 1 import not.there: "
      'install it, or leave the import out',
    ),
    (
      ['--gin_file=s3://bucket/x.gin'],
      's3://bucket/x.gin is neither on a local disk',
    ),
    (
      ['--gin_file=runs/leviathan2023.gin'],
      '{elsewhere}/runs/leviathan2023.gin includes itself: that of this '
      'package is gin_configs/runs/leviathan2023.gin',
    ),
  ],
)
def test_what_is_nowhere_found(run, elsewhere, flags, sentence):
  write(elsewhere / 'mine.gin', "include 'runs/infr.gin'")
  name = 'runs/leviathan2023.gin'
  write(elsewhere / name, f"include '{name}'")
  words = {'elsewhere': elsewhere, 'shipped': ROOT / 'gin_configs'}
  flags = [flag.format(**words) for flag in flags]
  assert_refused(run('infer', *flags), 'gin: ' + sentence.format(**words))


def test_a_task_is_learnt_with_a_vocabulary(run, elsewhere):
  flags = [f'--gin.{x.replace(" ", "")}' for x in (*TRAIN, 'TRAIN_STEPS = 7')]
  flags.append("--gin.MIXTURE_OR_TASK_NAME='task.jsonl'")
  refused = run('train', '--gin_file=runs/train_task.gin', *flags)
  assert_refused(
    refused, 'gin: no value for VOCABULARY: give --gin.VOCABULARY='
  )


def test_help_has_the_short_names(run, monkeypatch):
  monkeypatch.setenv('COLUMNS', '200')
  text = run('infer', '--help').out
  assert 'macros of runs/infer.gin, as --gin.NAME=VALUE' in text
  assert not re.findall('.*gin_configs.*', text)
