"""Names of loops say what they loop over."""

import pytest

from specdec_jax.models import loop_names
from specdec_jax.models.loop_names import CacheBlocks, ChosenExperts


@pytest.mark.parametrize(
  'loop',
  [
    CacheBlocks(256, 700),
    ChosenExperts(2, 8, 3),
    ChosenExperts(2, 8, 3, num_devices=4),
  ],
)
def test_a_loop_is_read_from_its_name(loop):
  metadata = f'metadata={{op_name="jit(f)/layer_0/{loop.scope}/while"}}'
  assert loop_names.read(metadata) == loop
  # An operation of the loop's body is no loop.
  assert loop_names.read(metadata.replace('while', 'while/body/add')) is None
