"""Tiny models to be read or spoilt, as Hugging Face and T5X write them."""

import shutil

import pytest

from specdec_jax.models import families
from tests.checkpoints import huggingface_folders
from tests.checkpoints.tiny_models import make_config, make_params
from tests.checkpoints.tiny_t5 import T5X, T5X_CONFIG


@pytest.fixture
def folder(tmp_path):
  """A folder of Hugging Face's with a tiny model."""
  config = make_config()
  huggingface_folders.save(tmp_path, config, make_params(config))
  return tmp_path


@pytest.fixture(scope='module')
def shapes():
  """The parameters of T5X's checkpoints."""
  return families.param_shapes(T5X_CONFIG)


@pytest.fixture
def legacy(tmp_path):
  """A copy of what T5X wrote by itself."""
  folder = tmp_path / 'checkpoint_7'
  shutil.copytree(T5X / 't5x_legacy' / 'checkpoint_7', folder)
  return folder


@pytest.fixture
def orbax_folder(tmp_path):
  """A copy of what T5X wrote with Orbax."""
  folder = tmp_path / 'checkpoint_7'
  shutil.copytree(T5X / 't5x_orbax' / 'checkpoint_7', folder)
  return folder
