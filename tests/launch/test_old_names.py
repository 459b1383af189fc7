"""gin files, flags and output folders of an earlier release still work."""

import argparse
import json
import pathlib
import re
import shutil

import pytest

pytest.importorskip('gin')
pytest.importorskip('sentencepiece')
pytest.importorskip('tensorstore')

import gin

from specdec_jax.infer import decoding, output
from specdec_jax.launch import gin_launch, old_names
from tests.cli import infer_runs, tiny

OLD = pathlib.Path(__file__).parents[1] / 'golden' / 'old_infer'
# What its gin files imported, and each name that they bound or referred to.
IMPORTS = """\
from specdec_jax import verification
from specdec_jax.cli import infer
from specdec_jax.cli import infer_decoding
from specdec_jax.cli import infer_models
from specdec_jax.cli import train
from specdec_jax.cli import train_distilled
from specdec_jax.cli import train_drafters
from specdec_jax.data import tasks
from specdec_jax.drafters import schedules
from specdec_jax.models import presets
from specdec_jax.training import datasets
from specdec_jax.training import glancing
from specdec_jax.training import length_buckets
from specdec_jax.training import optimizers
"""
NAMES = """\
datasets.from_task datasets.from_token_files datasets.mix glancing.block_loss
glancing.with_ratio infer.infer infer_decoding.Decoding infer_models.Model
infer_models.device_mesh infer_models.draft_model infer_models.ngram
infer_models.no_drafter infer_models.prompt_lookup infer_models.spec_drafter
infer_models.uniform length_buckets.from_token_files optimizers.adafactor
optimizers.adamw optimizers.learning_rate presets.preset presets.spec_drafter
schedules.heuristic schedules.running_alpha tasks.find train.train
train_distilled.distillation_loss train_distilled.drafter_texts
train_drafters.block_heads_config train_drafters.block_heads_loss
train_drafters.block_heads_params train_drafters.spec_drafter_params
verification.block_verification verification.greedy
verification.speculative_sampling verification.top_beta
"""
DYNAMIC = 'from __gin__ import dynamic_registration\n'
LENIENT = infer_runs.gin_file('verification/lenient_greedy.gin')
MODEL = infer_runs.gin_file('drafters/model.gin')


def parse(tmp_path, text: str | None, *bindings: str, files=()) -> None:
  """What `infer` reads: a user's file, then shipped ones, then bindings."""
  names = []
  if text is not None:
    path = tmp_path / 'user.gin'
    path.write_text(text)
    names.append(str(path))
  gin_launch.parse(
    argparse.Namespace(
      gin_file=[*names, *files],
      gin_bindings=list(bindings),
      gin_search_paths='.',
    )
  )


def chosen() -> decoding.Decoding:
  return gin.get_configurable(decoding.Decoding)()


MACROS = (
  'MIXTURE_OR_TASK_NAME="task.jsonl"',
  'TASK_FEATURE_LENGTHS={"inputs": 12, "targets": 16}',
  'CHECKPOINT_PATH="model"',
  'DRAFTER_CHECKPOINT_PATH="draft"',
  'INFER_OUTPUT_DIR="out"',
)


@pytest.mark.parametrize('name', NAMES.split())
def test_every_name_of_the_old_files_is_found(name, tmp_path):
  text = f'{DYNAMIC}{IMPORTS}X = @{name}\nfind.split = %X\n'
  parse(tmp_path, text.replace('find.split', 'tasks.find.split'))
  [value] = [v for k, v in gin_launch.bindings().items() if k == 'X']
  gin.get_configurable(value.removeprefix('@'))


def test_a_users_copy_of_the_old_files_chooses_the_same(tmp_path):
  parse(
    tmp_path,
    (OLD / 'user.gin').read_text(),
    *MACROS,
    'infer_decoding.Decoding.batch_size=4',
    'draft_model.gamma=3',
    'greedy.lenience=0.7',
  )
  made = chosen()
  assert made.batch_size == 4
  drafter = made.make_drafter()
  assert (drafter.gamma, drafter.model.checkpoint) == (3, 'draft')
  rule = made.rule()
  assert rule.temperature == 1.0
  assert rule.verify_fn().__name__ == 'greedy'
  assert gin_launch.bindings()['verification.greedy.lenience'] == '0.7'


@pytest.mark.parametrize(
  'binding',
  [
    'greedy.lenience=0.7',
    'verification.greedy.lenience=0.7',
    'Greedy.lenience=0.7',
    'rules.Greedy.lenience=0.7',
  ],
)
def test_old_bindings_of_the_shipped_files(tmp_path, binding):
  files = [
    'models/as_stored.gin',
    'runs/infer.gin',
    'drafters/model.gin',
    'verification/lenient_greedy.gin',
  ]
  bindings = ('infer_decoding.Decoding.batch_size=4', 'draft_model.gamma=3')
  parse(tmp_path, None, *MACROS, *bindings, binding, files=files)
  made = chosen()
  assert made.batch_size == 4
  assert made.make_drafter().gamma == 3
  assert made.rule().lenience == 0.7


def test_texts_and_comments_are_left_alone():
  text = "x = 'infer_models.Model'  # Of infer_models.Model.\n"
  assert old_names.renewed(text) == text
  binding = 'DRAFTER_TEXT="verification.greedy of infer_models.ngram"'
  assert old_names.renewed_binding(binding, {}) == binding


def test_an_old_config_gin_is_a_gin_file(tmp_path, capfd):
  """What `infer` wrote of all that it used, defaults included."""
  model = infer_runs.write_model(tmp_path / 'model')
  text = (OLD / 'config.gin').read_text().replace('HOME', str(tmp_path))
  (tmp_path / 'config.gin').write_text(text)
  result = tiny.run(
    capfd, 'infer', f'--gin_file={tmp_path / "config.gin"}', '--dry_run'
  )
  assert result.status == 0, result.err
  assert str(model) in text


@pytest.fixture
def half_finished(tmp_path) -> pathlib.Path:
  """The output folder of a run that was stopped, with its model and task."""
  infer_runs.write_model(tmp_path / 'model')
  infer_runs.write_task(tmp_path / 'task.jsonl', 6)
  out = tmp_path / 'out'
  folder = out / 'tmp-task-predict-00000-of-00001'
  folder.mkdir(parents=True)
  settings = (OLD / 'settings.json').read_text()
  text = settings.replace('HOME', str(tmp_path))
  (folder / 'settings.json').write_text(text)
  chunk = folder / 'task-predict.jsonl-00000-of-00001-chunk00000'
  shutil.copy(OLD / 'chunk.jsonl', chunk)
  shutil.copy(OLD / 'chunk.COMPLETED', f'{chunk}.COMPLETED')
  return out


def resume(capfd, out: pathlib.Path, *more: str) -> tiny.Result:
  home = out.parent
  flags = [
    *infer_runs.argv(home / 'model', home / 'task.jsonl', out, MODEL, LENIENT),
    f"--gin.DRAFTER_CHECKPOINT_PATH='{home / 'model'}'",
    '--gin.infer_decoding.Decoding.batch_size=4',
    '--gin.draft_model.gamma=3',
    '--gin.greedy.lenience=0.7',
    *more,
  ]
  return tiny.run(capfd, *flags)


def test_a_half_finished_folder_is_resumed(half_finished, capfd, monkeypatch):
  changed = resume(capfd, half_finished, '--gin.draft_model.gamma=2')
  tiny.assert_refused(changed, 'drafting.DraftModel.gamma was 3, now 2')
  changed = resume(capfd, half_finished, '--gin.greedy.lenience=0.5')
  tiny.assert_refused(changed, 'rules.Greedy.lenience was 0.7, now 0.5')

  written = []
  write_chunk = output.write_chunk

  def write(shard, index, *rest):
    written.append(index)
    return write_chunk(shard, index, *rest)

  monkeypatch.setattr(output, 'write_chunk', write)
  result = resume(capfd, half_finished)
  assert result.status == 0, result.err
  assert written == [1]  # The first chunk is the earlier release's.
  path = infer_runs.result(half_finished)
  found = infer_runs.records(path)
  expected = infer_runs.records(OLD / 'result.jsonl')
  assert found[:4] == expected[:4]
  for one, other in zip(found, expected, strict=True):
    log_prob = one['aux'].pop('log_prob')
    assert log_prob == pytest.approx(other['aux'].pop('log_prob'), abs=2e-4)
    assert one == other


def test_the_users_copy_resumes_too(half_finished, tmp_path):
  """Bindings by the old names are the settings that the folder has."""
  stored = json.loads(next(half_finished.glob('*/settings.json')).read_text())
  home = half_finished.parent
  macros = [
    f'MIXTURE_OR_TASK_NAME={str(home / "task.jsonl")!r}',
    "TASK_FEATURE_LENGTHS={'inputs': 12, 'targets': 16}",
    f'CHECKPOINT_PATH={str(home / "model")!r}',
    f'DRAFTER_CHECKPOINT_PATH={str(home / "model")!r}',
    f'INFER_OUTPUT_DIR={str(half_finished)!r}',
    "DTYPE='float32'",
    'Decoding.batch_size=4',
    'infer.checkpoint_period=1',
    'infer_models.device_mesh.num_devices=1',
    'infer_models.draft_model.gamma=3',
    'verification.greedy.lenience=0.7',
  ]
  parse(tmp_path, (OLD / 'user.gin').read_text(), *macros)
  given = {
    name: value
    for name, value in gin_launch.bindings().items()
    if not re.search(r'OUTPUT_DIR$|output_dir$|_shards$|shard_id$', name)
  }
  renewed = old_names.renewed_settings
  assert renewed(given) == renewed(stored)


def test_an_old_train_file_is_read(tmp_path):
  """A user's own file that includes a shipped one, and binds by old names."""
  text = f"""{DYNAMIC}
from specdec_jax.cli import train
from specdec_jax.cli import train_drafters
from specdec_jax.training import datasets

include 'runs/train_block_heads.gin'

TOKENS = 'tokens'
TARGET = 'target'
MODEL_DIR = 'out'
TRAIN_STEPS = 2
BATCH_SIZE = 3
train.train.loss = @train_drafters.block_heads_loss
train_drafters.block_heads_config.target = 'another'
datasets.from_token_files.seed = 4
"""
  parse(tmp_path, text, 'train.train.keep=3')
  found = gin_launch.bindings()
  assert found['train.train.train_steps'] == '%TRAIN_STEPS'
  assert found['datasets.from_token_files.batch_size'] == '%BATCH_SIZE'
  assert found['datasets.from_token_files.seed'] == '4'
  assert found['train.train.keep'] == '3'
  targets = [v for k, v in found.items() if k.endswith('.target')]
  assert sorted(targets) == ['%TARGET', "'another'"]


def test_modules_under_names_of_the_user_s_own():
  text = (
    'from __gin__ import dynamic_registration\n'
    'from specdec_jax.cli import train_drafters as d\n'
    'from specdec_jax.cli import infer_models as m\n'
    'from specdec_jax.cli import train as t\n'
    'from specdec_jax import verification as v\n'
    'd.block_heads_config.gamma = 3\n'
    'm.draft_model.gamma = 2\n'
    'm.Model.dtype = "float32"\n'
    'v.greedy.lenience = 0.5\n'
    't.train.seed = 4\n'
  )
  gin.clear_config()
  gin.parse_config(old_names.renewed(text))
  bound = gin_launch.bindings()
  assert bound['drafting.DraftModel.gamma'] == '2'
  assert bound['rules.Greedy.lenience'] == '0.5'
  assert bound['models.Model.dtype'] == "'float32'"
  assert (bound['recipes.block_heads_config.gamma'], bound['t.train.seed']) == (
    '3',
    '4',
  )
