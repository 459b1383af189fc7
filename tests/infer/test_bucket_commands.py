"""`infer`, `merge` and `eval` with everything in a bucket, and with nothing
there."""

import json
import re

import pytest

pytest.importorskip('gin')
pytest.importorskip('sentencepiece')
pytest.importorskip('rouge_score')
pytest.importorskip('sacrebleu')

from specdec_jax.cli.main import main
from specdec_jax.files.paths import user_path
from specdec_jax.infer.output import Shard
from tests.checkpoints import tiny_t5
from tests.cli.tiny import run_well
from tests.files.test_bucket_failures import told
from tests.infer import infer_runs, test_infer_output
from tests.infer.infer_runs import argv

NUM_EXAMPLES = 40
NAME = 'task-predict.jsonl'


@pytest.fixture(scope='module')
def inputs(tmp_path_factory):
  """A model, a task and a gin file."""
  folder = tmp_path_factory.mktemp('inputs')
  tiny_t5.write_model(folder / 't5')
  infer_runs.write_task(folder / 'task.jsonl', NUM_EXAMPLES)
  (folder / 'own.gin').write_text(
    "include 'gin_configs/drafters/uniform.gin'\ninclude 'more.gin'\n"
  )
  (folder / 'more.gin').write_text('drafters.Uniform.gamma = 3\n')
  return folder


def infer(inputs, out, **bindings):
  return argv(
    f'{inputs}/t5',
    f'{inputs}/task.jsonl',
    out,
    '--gin_file=own.gin',
    f'--gin_search_paths={inputs}',
    **bindings,
  )


def unwrapped(data: bytes) -> bytes:
  """Without what gin breaks lines with where paths are long or have spaces, and
  digests of weights, of which a disk keeps no checksums."""
  return re.sub(rb'[\\\s\'()]+|(?<=weights": )"\w+"', b'', data)


def test_the_later_of_two_runs_that_begin_together_is_refused(server, bucket):
  shard = Shard(
    folder=user_path(bucket),
    task='task',
    mode='predict',
    shard_id=0,
    num_shards=1,
  )
  test_infer_output.assert_later_run_refused(shard)


def test_infer_merge_and_eval(server, bucket, inputs, tmp_path, capfd):
  """Sharded, from a bucket and to one: every file but for the paths in it is
  that of a run from a disk to a disk. Names are no patterns of others."""
  there = server.upload(inputs, f'{bucket}/inputs')
  local, out = tmp_path / 'out[1]', f'{bucket}/results/out[1]'
  other = f'tmp-{NAME.removesuffix(".jsonl")}-00000-of-00002/chunk'
  server.upload(inputs / 'task.jsonl', f'{bucket}/results/out1/{other}')
  for shard in (0, 1):
    for source, target in ((inputs, local), (there, out)):
      command = infer(source, target, infer__num_shards=2)
      run_well(capfd, *command, f'--shard_id={shard}')
  for target in (local, out):
    printed = run_well(capfd, 'merge', target)
    assert f'{NAME}-00000-of-00001:{NUM_EXAMPLES}ex' in ''.join(printed.split())
  objects = server.objects(out)
  files = {path.name: path.read_bytes() for path in local.iterdir()}
  renamed = {
    name: data.replace(there.encode(), str(inputs).encode()).replace(
      out.encode(), str(local).encode()
    )
    for name, data in objects.items()
  }
  assert set(renamed) == set(files)
  for name, data in files.items():
    assert unwrapped(renamed[name]) == unwrapped(data)
    if '.jsonl-' in name and not name.endswith('.COMPLETED'):
      assert objects[name] == data
  figures = []
  for target in (local, out):
    json_path = f'{target}-eval.json'
    run_well(
      capfd, 'eval', f'{target}/{NAME}-00000-of-00001', '--json', json_path
    )
    figures.append(run_well(capfd, 'eval', f'{target}/{NAME}-00000-of-00001',
                       '--json', '-'))  # fmt: skip
  assert json.loads(figures[0]) == json.loads(figures[1])
  stored = server.objects(f'{bucket}/results')['out[1]-eval.json']
  assert stored == (tmp_path / 'out[1]-eval.json').read_bytes()
  assert set(server.objects(f'{bucket}/results/out1')) == {other}
  # Once more: all is there already.
  assert main(infer(there, out, infer__num_shards=2)) == 0
  assert f'{out}/{NAME}-00000-of-00002 is complete already' in (
    capfd.readouterr().err
  )


def test_a_gin_file_that_is_not_there(server, bucket, inputs, capfd):
  there = server.upload(inputs, f'{bucket}/inputs')
  assert main(['infer', f'--gin_file={there}/owm.gin']) == 2
  assert f'no file {there}/owm.gin' in capfd.readouterr().err


@pytest.mark.parametrize('flag', ['', '--gin_remote_imports'])
def test_a_gin_file_in_a_bucket_runs_code_if_asked(
  server, bucket, tmp_path, capfd, flag
):
  """Also in a dry run, and through a module of this package."""
  ran = tmp_path / 'ran'
  gin = tmp_path / 'evil.gin'
  gin.write_text(
    'from __gin__ import dynamic_registration\n'
    'from specdec_jax.launch import progress\n'
    "include 'runs/infer.gin'\n"
    f'progress.os.system.command = \'touch "{ran}"\'\n'
    'MODEL = @progress.os.system()\n'
  )
  there = server.upload(gin, f'{bucket}/evil.gin')
  own = tmp_path / 'own.gin'
  own.write_text(f"include '{there}'\n")
  command = infer_runs.argv(
    'ende-nano', 'task.jsonl', 'out', '--dry_run', flag, VOCABULARY="'a'"
  )
  command = [each for each in command if each and 'as_stored' not in each]
  for name in (there, own):
    assert main([*command, f'--gin_file={name}']) == 2
    said = capfd.readouterr().err
    assert ('--gin_remote_imports' in said) == (not flag)
    assert ran.exists() == bool(flag)


def test_a_folder_in_a_bucket_without_shards(bucket, capfd):
  assert told(capfd, 'merge', f'{bucket}/out') == (
    f'{bucket}/out has no shards to merge'
  )
