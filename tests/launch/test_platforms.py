"""What is done for libtpu before jax loads it."""

import glob
import importlib.machinery
import os
import sys
import types

import jax
import pytest

from specdec_jax.launch import platforms
from specdec_jax.sharding import mesh


@pytest.fixture
def _libtpu(monkeypatch):
  """As if libtpu were installed, and jax had not chosen a device yet."""
  module = types.ModuleType('libtpu')
  module.__spec__ = importlib.machinery.ModuleSpec('libtpu', None)
  monkeypatch.setitem(sys.modules, 'libtpu', module)
  before = jax.config.jax_platforms
  jax.config.update('jax_platforms', None)
  yield
  jax.config.update('jax_platforms', before)


@pytest.fixture
def _deleted(monkeypatch, tmp_path):
  """A working directory that was deleted."""
  folder = tmp_path / 'deleted'
  folder.mkdir()
  monkeypatch.chdir(folder)
  folder.rmdir()


@pytest.mark.usefixtures('_libtpu', '_deleted')
def test_a_directory_that_was_deleted_is_named():
  for call in (
    platforms.prepare_libtpu,
    platforms.answer_libtpu,
    lambda: mesh.check_devices(1),
  ):
    with pytest.raises(ValueError, match='the working directory was deleted'):
      call()
  jax.config.update('jax_platforms', 'cpu')
  platforms.prepare_libtpu()


@pytest.mark.usefixtures('_deleted')
def test_without_libtpu_a_deleted_directory_is_as_good_as_another(monkeypatch):
  monkeypatch.setitem(sys.modules, 'libtpu', None)
  platforms.prepare_libtpu()
  mesh.check_devices(1)


@pytest.mark.usefixtures('_libtpu')
@pytest.mark.parametrize(
  ('asked', 'devices', 'is_answered'),
  [('1', [], True), ('1', ['/dev/accel0'], False), ('0', [], False)],
)
def test_questions_are_answered_where_there_is_no_chip(
  monkeypatch, asked, devices, is_answered
):
  monkeypatch.setattr(os, 'environ', {'TPU_SKIP_MDS_QUERY': asked})
  monkeypatch.setattr(glob, 'glob', lambda pattern: devices)
  platforms.prepare_libtpu()
  assert ('TPU_ACCELERATOR_TYPE' in os.environ) == is_answered
