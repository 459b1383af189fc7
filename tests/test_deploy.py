"""What launches a run elsewhere: the files of deploy/, as far as this goes
without a cloud."""

import os
import re
import subprocess
from pathlib import Path

import pytest

from specdec_jax.cli.main import main

ROOT = Path(__file__).parents[1]
DEPLOY = ROOT / 'deploy'
# Stands in for gcloud: $STATES holds what `describe` answers, one word a look,
# the last of them for good, and FAILS if it gets none; $RUNS the exit statuses
# of the commands, $REACHED of those that do nothing.
GCLOUD = r"""#!/usr/bin/env bash
echo "$@" >> "$CALLS"
next() {
  head -n 1 "$1"
  [ "$(wc -l < "$1")" = 1 ] || sed -i 1d "$1"
}
case "$*" in
  *describe*) next "$STATES" | grep -v FAILS ;;
  *--command=true) exit "$(next "$REACHED")" ;;
  *ssh*) exit "$(next "$RUNS")" ;;
esac
"""


@pytest.fixture
def launch(tmp_path):
  """Runs `spot_tpu.sh`; the exit status, and what gcloud was asked for."""
  gcloud = tmp_path / 'bin' / 'gcloud'
  gcloud.parent.mkdir()
  gcloud.write_text(GCLOUD)
  gcloud.chmod(0o755)

  def call(states: str, runs: str, reached='0') -> tuple[int, list[str]]:
    texts = {'STATES': states, 'RUNS': runs, 'REACHED': reached, 'CALLS': ''}
    files = {name: tmp_path / name for name in texts}
    for name, words in texts.items():
      files[name].write_text(''.join(f'{word}\n' for word in words.split()))
    done = subprocess.run(
      [DEPLOY / 'spot_tpu.sh', 'slice', 'set up', 'specdec infer'],
      env={
        'PATH': f'{gcloud.parent}:{os.environ["PATH"]}',
        'ZONE': 'zone',
        'ACCELERATOR_TYPE': 'v4-32',
        'RUNTIME_VERSION': 'version',
        'POLL_SECONDS': '0',
        **{name: str(path) for name, path in files.items()},
      },
      timeout=180,
      check=False,
    )
    asked = files['CALLS'].read_text().splitlines()
    words = r'create|delete|set up|specdec infer'
    found = [re.search(words, line) for line in asked]
    return done.returncode, [each[0] for each in found if each]

  return call


BEGIN = ['create', 'set up', 'specdec infer']


def test_a_slice_that_is_taken_away_is_asked_for_again(launch):
  """In the middle of the command, which answers before the queue knows; then
  before it was there at all."""
  states = 'WAITING_FOR_RESOURCES PROVISIONING ACTIVE ACTIVE SUSPENDING '
  states += 'SUSPENDED ACTIVE'
  status, asked = launch(states, '0 255 0')
  assert status == 0
  assert asked == [*BEGIN, 'delete', 'create', 'delete', *BEGIN, 'delete']


def test_a_command_that_fails_by_itself_is_not_repeated(launch):
  assert launch('ACTIVE', '0 1') == (1, BEGIN)


def test_a_request_that_fails_is_withdrawn(launch):
  assert launch('CREATING FAILED', '0') == (1, ['create', 'delete'])


def test_a_queue_that_does_not_answer_is_asked_again(launch):
  """For a while: at first, and whether a slice is still there."""
  done = [*BEGIN, 'delete']
  assert launch('FAILS FAILS ACTIVE', '0') == (0, done)
  assert launch('ACTIVE FAILS ACTIVE', '0 1') == (1, BEGIN)
  assert launch('FAILS', '0') == (1, ['create'])


def test_a_slice_is_used_when_it_can_be_reached(launch):
  assert launch('ACTIVE', '0', reached='255 255 0') == (0, [*BEGIN, 'delete'])
  assert launch('ACTIVE', '0', reached='255') == (1, ['create'])


@pytest.fixture(scope='module')
def job():
  yaml = pytest.importorskip('yaml')
  text = (DEPLOY / 'jobset.yaml').read_text(encoding='utf-8')
  return yaml.safe_load(text)


def test_the_hosts_of_the_job_are_those_of_its_slice(job):
  (replicated,) = job['spec']['replicatedJobs']
  spec = replicated['template']['spec']
  pod = spec['template']['spec']
  (container,) = pod['containers']
  x, y = map(
    int, pod['nodeSelector']['cloud.google.com/gke-tpu-topology'].split('x')
  )
  hosts = x * y // container['resources']['limits']['google.com/tpu']
  assert spec['parallelism'] == spec['completions'] == hosts
  assert pod['restartPolicy'] == 'Never'
  (rule,) = spec['podFailurePolicy']['rules']
  assert rule['onExitCodes']['containerName'] == container['name']


def test_the_command_of_the_job_can_be_run(job, capfd):
  pytest.importorskip('gin')
  pytest.importorskip('orbax.checkpoint')
  (replicated,) = job['spec']['replicatedJobs']
  pod = replicated['template']['spec']['template']['spec']
  command = 'infer', '--multiprocess', '--gin_file=gs://BUCKET/run.gin'
  assert pod['containers'][0]['args'] == [*command]
  local = f'--gin_file={DEPLOY / "run.gin"}'
  assert main([command[0], local, '--dry_run']) == 0
  assert 'model 4' in capfd.readouterr().out


def test_the_container_has_what_it_needs():
  text = (DEPLOY / 'Dockerfile').read_text(encoding='utf-8')
  setup = (ROOT / 'setup.py').read_text(encoding='utf-8')
  extras = {
    extra
    for found in re.findall(r'EXTRAS=([\w,]+)', text)
    for extra in found.split(',')
  }
  assert extras >= {'tpu', 'infer'}
  for extra in extras:
    assert f"    '{extra}': " in setup, extra
  assert 'ENTRYPOINT ["specdec"]' in text
  assert 'specdec = specdec_jax.cli.main:main' in setup
  kept = re.findall(r'^!(.*)$', (ROOT / '.dockerignore').read_text(), re.M)
  assert all((ROOT / name).exists() for name in kept)
