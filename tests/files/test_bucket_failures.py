"""What users are told when a bucket, or the way to it, is not as it should."""

import re
import subprocess
import sys

import pytest

pytest.importorskip('gcsfs')

import aiohttp
import gcsfs
import google.auth.exceptions
from gcsfs.retry import HttpError

from specdec_jax import lazy
from specdec_jax.checkpoints import loading, stored_arrays, t5x
from specdec_jax.cli.main import main
from specdec_jax.files import buckets, full_disk
from specdec_jax.files.paths import user_path
from tests import children, slow
from tests.checkpoints.tiny_t5 import make_config, make_params
from tests.files import door as doors
from tests.files import server as servers
from tests.files.server import NOWHERE


def told(capfd, *command, status=2) -> str:
  """The one line of a command that is refused."""
  found = main([str(each) for each in command])
  lines = capfd.readouterr().err.splitlines(keepends=True)
  # tensorstore says once where it has the test's token from.
  err = ''.join(each for each in lines if 'auth_provider' not in each)
  assert found == status, err
  assert err.count('\n') == 1, err
  return err.removeprefix('specdec: error: ').strip()


COMMANDS = {
  'generate --model': ('generate', '--prompt=a', '--model', NOWHERE),
  'generate --prompts': (
    *('generate', '--model=ende-nano', '--prompts', NOWHERE),
  ),
  'generate --json': (
    *('generate', '--model=ende-nano', '--prompt=a', '--json', NOWHERE),
  ),
  'convert from': ('convert', NOWHERE, 'out', '--to=safetensors'),
  'convert to': ('convert', 'ende-nano', NOWHERE, '--to=safetensors'),
}
for rows in lazy.installed(
  'tests.infer.contract_rows:BUCKET_COMMANDS',
  'tests.planning.contract_rows:BUCKET_COMMANDS',
  'tests.trace.contract_rows:BUCKET_COMMANDS',
):
  COMMANDS |= rows


@pytest.mark.parametrize('command', COMMANDS.values(), ids=COMMANDS)
def test_no_such_bucket(server, command, tmp_path, monkeypatch, capfd):
  monkeypatch.chdir(tmp_path)
  found = told(capfd, *command)
  assert found.endswith('there is no bucket of this name')
  assert 'gs://there-is-none' in found
  assert not list(tmp_path.iterdir())


def test_nothing_in_the_bucket(bucket, capfd):
  assert told(
    capfd, 'generate', '--prompt=a', '--model', f'{bucket}/t5'
  ).startswith(f"no model is called '{bucket}/t5': give ")


def test_no_server(server, impatient, monkeypatch, capfd):
  """Nobody listens: asked several times, then said."""
  buckets._find_bucket.cache_clear()
  asked = []
  request = aiohttp.ClientSession.request

  def counted(self, *args, **kwargs):
    asked.append(args)
    return request(self, *args, **kwargs)

  monkeypatch.setattr(aiohttp.ClientSession, 'request', counted)
  address = f'http://127.0.0.1:{servers.free_port()}'
  monkeypatch.setenv('STORAGE_EMULATOR_HOST', address)
  command = 'generate', '--prompt=a', '--model', 'gs://absent/t5'
  found = told(capfd, *command, status=75)
  assert found.startswith(
    'gs://absent/t5: the server of the bucket does not answer after several '
    'attempts: run the command again later (Cannot connect to host '
  )
  assert len(asked) == gcsfs.GCSFileSystem.retries


REFUSALS = {
  'forbidden': (
    OSError('Forbidden: b/x\nx does not have storage.objects.get access'),
    PermissionError,
    'no permission: .* does not have storage.objects.get access',
  ),
  'unknown': (
    HttpError({'code': 401, 'message': 'Anonymous caller'}),
    PermissionError,
    'gcloud auth application-default login.*; Anonymous caller, 401',
  ),
  'no credentials': (
    google.auth.exceptions.RefreshError('expired'),
    PermissionError,
    'no permission: .*expired',
  ),
  'tensorstore': (
    ValueError('PERMISSION_DENIED: Error reading "x": HTTP 403 [a=1]'),
    PermissionError,
    r"no permission: .*; PERMISSION_DENIED: Error reading \"x\": HTTP 403: 'gs",
  ),
  'silence': (TimeoutError(), ConnectionError, 'does not answer'),
  'silence, of tensorstore': (
    ValueError('ABORTED: All 32 retry attempts failed: CURL error[7] [a=1]'),
    ConnectionError,
    r'does not answer.*All 32 retry attempts failed: CURL error\[7\]\)',
  ),
  'overload': (
    HttpError({'code': 503, 'message': 'busy'}),
    ConnectionError,
    'does not answer.*busy, 503',
  ),
}


@pytest.mark.parametrize(
  ('error', 'kind', 'sentence'), REFUSALS.values(), ids=REFUSALS
)
def test_refusals(server, error, kind, sentence):
  with pytest.raises(kind, match=sentence) as raised, full_disk.named('gs://a'):
    raise error
  assert raised.value.filename == 'gs://a'


def test_our_own_errors_stay(server):
  with pytest.raises(ValueError, match='mine'), full_disk.named('gs://a/b'):
    raise ValueError('mine')


def test_an_array_that_the_server_refuses(server, bucket, monkeypatch):
  """It is not called damaged."""
  config = make_config()
  path = t5x.write_target(bucket, make_params(config), step=1)
  monkeypatch.setattr(
    loading.formats.t5x.stored_arrays,
    '_values',
    lambda *_: (_ for _ in ()).throw(ValueError('UNAVAILABLE: CURL error')),
  )
  with pytest.raises(OSError, match=r'not answer.*UNAVAILABLE') as raised:
    loading.read(path, config=config)
  assert raised.value.filename == f'{bucket}/checkpoint_1'


@pytest.mark.slow
def test_a_server_that_is_away_for_a_while(server, bucket, tmp_path):
  """A command waits for it, and ends well."""
  user_path(
    bucket,
  ).joinpath('task.txt').write_text('a\n')
  command = [
    *(sys.executable, '-m', 'specdec_jax', 'convert', 'ende-nano'),
    *(f'{bucket}/out', '--to=t5x_legacy'),
  ]
  process = subprocess.Popen(
    command, env=children.environment(), stderr=subprocess.PIPE, text=True
  )
  with server.hanging(), pytest.raises(subprocess.TimeoutExpired):
    process.wait(timeout=8)
  _, err = process.communicate(timeout=180)
  assert process.returncode == 0, err
  assert 'checkpoint_0/checkpoint' in server.objects(f'{bucket}/out')


@pytest.fixture
def hasty(monkeypatch):
  """tensorstore asks three times, in no time: its `gcs_request_retries`, in
  the specs of this package, and in the context of Orbax."""
  tensorstore_utils = pytest.importorskip(
    'orbax.checkpoint._src.serialization.tensorstore_utils'
  )
  few = {
    'gcs_request_retries': {
      'max_retries': 3,
      'initial_delay': '1ms',
      'max_delay': '2ms',
    }
  }
  kvstore = stored_arrays.kvstore

  def with_few(folder):
    found = kvstore(folder)
    return found | few if found['driver'] == 'gcs' else found

  monkeypatch.setattr(stored_arrays, 'kvstore', with_few)
  monkeypatch.setattr(
    tensorstore_utils,
    '_DEFAULT_OCDBT_TS_CONTEXT',
    tensorstore_utils._DEFAULT_OCDBT_TS_CONTEXT | few,
  )


# Orbax closes the loop in which it waits for all arrays when the first fails.
@pytest.mark.filterwarnings('ignore::pytest.PytestUnraisableExceptionWarning')
@slow.parametrize(
  ('to', 'array'),
  [('t5x_legacy', '/target.'), ('orbax', 'ocdbt')],
  now=[('orbax', 'ocdbt')],
)
def test_a_server_that_stays_away(
  door, server, bucket, impatient, hasty, tmp_path, capfd, to, array
):
  """It answers nobody any more from the first array on, while a checkpoint is
  written and while it is read: said of the checkpoint, and not that it is
  damaged. Later the same commands end as on a disk."""
  there = f'{bucket}/model'
  local, back = tmp_path / 'local', tmp_path / 'back'
  assert main(['convert', 'ende-nano', str(local), '--to=safetensors']) == 0
  for command in (
    ['convert', 'ende-nano', there, f'--to={to}'],
    ['convert', there, str(back), '--to=safetensors'],
  ):
    door.refusal = doors.everything_after(array)
    found = told(capfd, *command, status=75)
    assert re.match(rf'(cannot write )?{there}\S*: the server', found), found
    assert 'does not answer after several attempts: run the command' in found
    assert not back.exists()
    door.refusal = lambda *_: None
    assert main(command) == 0
  assert files(back) == files(local)


@pytest.mark.slow
def test_a_busy_server_is_asked_again(door, bucket, impatient, tmp_path):
  """By gcsfs and by tensorstore; what they write is that of a local folder."""
  left = {True: 2, False: 2}

  def busy(method, path, body):
    is_tensorstore = 'uploadType=media' in path
    if method != 'POST' or not left[is_tensorstore]:
      return None
    left[is_tensorstore] -= 1
    return 503

  door.refusal = busy
  command = ['convert', 'ende-nano', '--to=t5x_legacy']
  assert main([*command, str(tmp_path / 'out')]) == 0
  assert door.num_refused == 0
  assert main([*command, f'{bucket}/out']) == 0
  assert door.num_refused == 4
  door.refusal = lambda *_: None
  main(['convert', f'{bucket}/out', str(tmp_path / 'back'), '--to=t5x_legacy'])
  assert files(tmp_path / 'back') == files(tmp_path / 'out')


def files(folder) -> dict:
  return {
    path.relative_to(folder): path.read_bytes()
    for path in folder.rglob('*')
    if path.is_file()
  }
