"""A server of buckets, which gcsfs and tensorstore talk to; a pytest plugin."""

import itertools
import os
import warnings

import pytest

from tests import children
from tests.files import door as doors
from tests.files import pods
from tests.files import server as servers

# Before gcsfs is imported: it would ask a server that there is not.
os.environ.setdefault('GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT', 'false')


@pytest.fixture(scope='session')
def server():
  for package in ('tensorstore', 'gcsfs'):
    pytest.importorskip(package)
  if servers.binary() is None:
    pytest.skip('needs the server of the extra dev, which is for linux-amd64')
  with servers.running() as found:
    servers.use(found.port)
    yield found


@pytest.fixture
def bucket(server, large_bodies, _names=itertools.count()):
  """The path of a bucket of its own."""
  return server.make_bucket(f'bucket-{next(_names)}')


@pytest.fixture
def large_bodies():
  """gcsfs hands bytes to aiohttp, which would like to have a file."""
  warnings.filterwarnings('ignore', 'Sending a large body')


@pytest.fixture
def door(server, monkeypatch):
  """Before the server, which is reached through it alone."""
  with doors.opened(server.port) as found:
    for name, value in servers.environment(found.port).items():
      monkeypatch.setenv(name, value)
    yield found


@pytest.fixture
def impatient(monkeypatch):
  """gcsfs asks again at once."""

  async def no_time(seconds):
    del seconds

  monkeypatch.setattr('gcsfs.retry.asyncio.sleep', no_time)


@pytest.fixture
def start_limited():
  """Starts a command that can write so many objects; what still runs in the end
  is killed."""
  with children.starter() as start_python:

    def call(num_writes, *flags, num_devices=1):
      arguments = '-c', pods.KILLED, str(num_writes), *flags
      return start_python(*arguments, num_devices=num_devices)

    yield call
