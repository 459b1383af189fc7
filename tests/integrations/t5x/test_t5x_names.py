"""The tables of names are of the installed T5X."""

import inspect
import pathlib
import re

import pytest

pytest.importorskip('t5x')

import t5x
from t5x import decoding, infer, partitioning, utils

from specdec_jax.assembly import t5x_names as names
from specdec_jax.launch import gin_files

pytestmark = pytest.mark.t5x

BOUND = {
  'DatasetConfig': utils.DatasetConfig,
  'PjitPartitioner': partitioning.PjitPartitioner,
  'RestoreCheckpointConfig': utils.RestoreCheckpointConfig,
  'beam_search': decoding.beam_search,
  'create_task_from_tfexample_file': infer.create_task_from_tfexample_file,
  'infer': infer.infer,
  'temperature_sample': decoding.temperature_sample,
}


@pytest.mark.parametrize('name', BOUND)
def test_every_renamed_argument_is_one_of_t5x(name):
  known = inspect.signature(BOUND[name]).parameters
  for bound in (*names._RENAMED, *names._IDLE, *names._AS_HERE):
    owner, _, argument = bound.partition('.')
    assert owner != name or not argument or argument in known, bound


def test_every_macro_of_its_run_is_known():
  run = pathlib.Path(t5x.__path__[0]) / 'configs' / 'runs' / 'infer.gin'
  text = gin_files.shipped_text('runs/infer.gin')
  for name in re.findall(r'^([A-Z_]+) =', run.read_text(), re.MULTILINE):
    found = names.rename([f'{name} = None'])
    assert f'\n{name} =' in text or not found, name
