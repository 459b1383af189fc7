"""Each parameter has one name in a file, and no other has it."""

import pytest

from specdec_jax.checkpoints import gguf, parameters, stored_arrays
from specdec_jax.checkpoints.huggingface import llama, t5
from specdec_jax.models import families
from tests.checkpoints import tiny_models, tiny_t5

LLAMA = tiny_models.make_config(is_tied=False, has_attention_bias=True)
T5 = tiny_t5.make_config()


@pytest.mark.parametrize(
  ('parameters_of', 'config'),
  [
    (gguf.parameters_of, LLAMA),
    (llama.parameters_of, LLAMA),
    (t5.parameters_of, T5),
  ],
)
def test_no_name_occurs_twice(parameters_of, config):
  found = parameters_of(config)
  names = {parameter.name for parameter in found}
  paths = {parameter.path for parameter in found}
  assert len(names) == len(paths) == len(found)
  assert paths == set(stored_arrays.flatten(families.param_shapes(config)))


def test_names_below_a_layer():
  renamed = lambda path: parameters.renamed(path, {'a/b': 'c', 'd': 'e'}, 'l{}')
  assert renamed('layers_12/a/b/kernel') == 'l12.c.weight'
  assert renamed('layers_0/a/b/bias') == 'l0.c.bias'
  assert renamed('d/scale') == 'e.weight'
