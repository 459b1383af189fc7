"""Gemma 4s of odd shapes equal to what Hugging Face transformers computed, in
ragged pieces.

`make_gemma4_variants.py` makes the file; it is never edited by hand.
"""

import functools
import json
import pathlib

import numpy as np
import pytest

from specdec_jax.checkpoints import huggingface
from specdec_jax.models import families
from tests import slow, toy
from tests.golden import pieces
from tests.golden.gemma4_variants import VARIANTS, drawn

save_file = pytest.importorskip('safetensors.numpy').save_file
BLOCK = 4


@functools.cache
def golden():
  path = pathlib.Path(__file__).parent / 'gemma4_variants.npz'
  with np.load(path) as arrays:
    arrays = dict(arrays)
  return arrays, json.loads(str(arrays['files']))


def read(folder: pathlib.Path, name: str):
  """The model and its params, read from the folder that transformers writes."""
  stated = golden()[1][name]
  (folder / 'config.json').write_text(json.dumps(stated['config']))
  tensors = {key: drawn(key, tuple(x)) for key, x in stated['tensors'].items()}
  save_file(tensors, folder / 'model.safetensors')
  config = huggingface.read_config(folder)
  params = huggingface.read_params(folder, config)
  return toy.compiled(families.language_model(config)), params


def test_all_are_computed():
  arrays, files = golden()
  assert files.keys() == VARIANTS.keys() == arrays.keys() - {'ids', 'files'}


# Rows go on from different lengths.
STARTS = [1, 6]


@slow.parametrize(
  'name',
  VARIANTS,
  now=['a window of 2', 'all but one of each type shared', 'one expert of 6'],
)
def test_logits_of_ragged_rows_after_rollback(tmp_path, name):
  model, params = read(tmp_path, name)
  ids, expected = golden()[0]['ids'], golden()[0][name]
  assert np.abs(expected).max() > 1
  prompt = pieces.prompt_of(ids, STARTS)
  pieces.check_ragged_rows(model, params, prompt, ids, expected, BLOCK)


@pytest.mark.slow
def test_logits_of_e4b_in_all_pieces(tmp_path):
  """Of whole rows, token by token, and along a path in a tree; the other three
  shapes have folders (`test_gemma_goldens.py`)."""
  name = 'shared, of one width, as E4B'
  model, params = read(tmp_path, name)
  ids, expected = golden()[0]['ids'], golden()[0][name]
  prompt = pieces.prompt_of(ids, STARTS)
  one_token = pieces.prompt_of(ids, [1, 1])
  whole = ids.shape[1]
  pieces.check_ragged_rows(model, params, one_token, ids, expected, whole)
  pieces.check_ragged_rows(model, params, prompt, ids, expected, 1)
  pieces.check_path_in_tree(model, params, prompt, ids, expected)


@pytest.mark.parametrize(
  ('change', 'message'),
  [
    ({'tie_word_embeddings': False}, 'tie_word_embeddings is False'),
    ({'top_k_experts': 0}, 'top_k_experts is 0'),
    ({'num_kv_shared_layers': 6}, 'the first needs its own'),
    ({'num_kv_shared_layers': 5}, 'there is none before layer 1'),
    ({'layer_types': ['chunked_attention'] * 6}, 'layer_types'),
  ],
)
def test_what_is_not_computed_is_refused_by_its_key(tmp_path, change, message):
  config = golden()[1]['shared, experts']['config'] | change
  (tmp_path / 'config.json').write_text(json.dumps(config))
  with pytest.raises(ValueError, match=message):
    huggingface.read_config(tmp_path)
