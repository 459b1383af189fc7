"""Suggestions for names that are not known."""

import pytest

from specdec_jax.launch.spelling import did_you_mean
from specdec_jax.models import presets


@pytest.mark.parametrize(
  ('name', 'meant'),
  [
    # By words; by letters `mt5_xxl` is closer.
    ('t5_xxl', 't5_1_1_xxl'),
    ('T5-Small', 't5_1_1_small'),
    ('llama_8b', 'llama_3_1_8b'),
    # By letters.
    ('mt5_smal', 'mt5_small'),
    ('llama_3_1_8', 'llama_3_1_8b'),
  ],
)
def test_sizes(name, meant):
  assert did_you_mean(name, presets.PRESETS) == f'; did you mean {meant}?'


def test_several_and_none():
  known = ('draft_model', 'draft_dtype', 'model')
  found = did_you_mean('draft_modle', known, most=2)
  assert found == '; did you mean draft_model or draft_dtype?'
  assert did_you_mean('top', known) == ''
  # One word alone is in many names.
  assert did_you_mean('draft', ('draft_model_of_another_size',)) == ''
