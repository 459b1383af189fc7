"""Everything that `t5x.infer` can be told is known to `specdec infer`."""

import contextlib
import inspect
import pathlib
import re

import pytest

pytest.importorskip('t5x')

import t5x
from t5x import decoding, infer, partitioning, utils

from specdec_jax.infer.infer import infer as own_infer
from specdec_jax.launch import gin_files, t5x_names

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
def test_every_argument_has_a_counterpart_or_a_sentence(name):
  own = inspect.signature(own_infer).parameters if name == 'infer' else {}
  for argument in inspect.signature(BOUND[name]).parameters:
    binding = f'{name}.{argument} = "x"'
    with contextlib.suppress(ValueError):  # A sentence.
      found = t5x_names.renewed([binding])
      assert found != [binding] or argument in own, argument


def test_every_macro_of_its_run_is_known():
  run = pathlib.Path(t5x.__path__[0]) / 'configs' / 'runs' / 'infer.gin'
  text = gin_files.shipped_text('runs/infer.gin')
  for name in re.findall(r'^([A-Z_]+) =', run.read_text(), re.MULTILINE):
    found = t5x_names.renewed([f'{name} = None'])
    assert f'\n{name} =' in text or not found, name
