"""`TextSettings` without a model: its fields, and settings over others."""

import dataclasses

import numpy as np
import pytest

from specdec_jax import base
from specdec_jax.assembly import packed_settings, text_settings
from specdec_jax.assembly.text_settings import TextSettings

FIELDS = {field.name: field for field in dataclasses.fields(TextSettings)}


def test_each_setting_is_a_flag_with_a_check():
  for name, field in FIELDS.items():
    assert field.default is None, name
    metadata = field.metadata
    for key in ('help', 'expected'):
      assert metadata[key], name
    for key in ('type', 'is_valid'):
      assert callable(metadata[key]), name


def test_columns_are_those_of_a_batch():
  sampling = text_settings.columns_of(base.Sampling)
  names = [field.name for field in dataclasses.fields(base.Sampling)]
  assert [column.name for column in sampling.values()] == names
  processors = text_settings.columns_of(base.Processors)
  names = {field.name for field in dataclasses.fields(base.Processors)}
  assert {column.name for column in processors.values()} <= names


def test_a_neutral_value_is_that_of_a_setting_that_is_not_given():
  disabled = TextSettings(
    temperature=0, top_k=0, top_p=1.0, min_p=0.0, typical_p=1.0
  )
  packed = packed_settings.sampling_of_rows([TextSettings(), disabled], 2)
  for values in vars(packed).values():
    assert values[0] == values[1]
  # Numbers beyond 32 bits are the largest that fits.
  many = packed_settings.sampling_of_rows([TextSettings(top_k=2**40)], 1)
  assert many.top_k.tolist() == [2**31 - 1]


@pytest.mark.parametrize(
  ('settings', 'usual', 'expected'),
  [
    ({}, {'temperature': 0.5, 'top_k': 3}, {'temperature': 0.5, 'top_k': 3}),
    ({'top_k': 4}, {'top_k': 3, 'top_p': 0.5}, {'top_k': 4, 'top_p': 0.5}),
    # Limits are of texts that are drawn.
    (
      {'temperature': 0, 'top_p': 0.5},
      {'temperature': 0.5, 'top_k': 3, 'regex': 'a'},
      {'temperature': 0, 'top_p': 0.5, 'regex': 'a'},
    ),
    # Two names of the least length.
    ({'min_new_tokens': 0}, {'min_length': 9}, {'min_new_tokens': 0}),
    ({'min_length': 2}, {'min_new_tokens': 9}, {'min_length': 2}),
  ],
)
def test_settings_over_usual_ones(settings, usual, expected):
  over = TextSettings(**settings).over(TextSettings(**usual))
  assert over == TextSettings(**expected)


def test_no_length_has_a_sign_with_a_meaning():
  """One table of three rows: counted from the prompt, forced, or neither."""
  prompt = base.Prompt(
    encoder_tokens=None,
    decoder_tokens=np.ones((3, 4), np.int32),
    decoder_lengths=np.array([4, 1, 2], np.int32),
    row_ids=np.arange(3, dtype=np.int32),
    max_lengths=np.array([9, 9, 9], np.int32),
  )
  rows = [
    TextSettings(min_length=6, forced_eos_token_id=2),
    TextSettings(forced_bos_token_id=3, begin_suppress_tokens=[5]),
    TextSettings(min_new_tokens=6, begin_suppress_tokens=[5]),
  ]
  pack = packed_settings.packer(rows, eos_ids=(2,), vocab_size=9)
  processors = pack(range(3), prompt).processors
  # Six tokens less the prompt's four; two tokens where one is forced first.
  assert processors.until.tolist() == [[2, 1], [2, 1], [1, 6]]
  # The eighth token is the last that is drawn of nine.
  assert processors.forced_at[:, 0].tolist() == [8, 1, 2**31 - 1]
