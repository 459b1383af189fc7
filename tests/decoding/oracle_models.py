"""Small models and prompts of the decodes whose outcome is known."""

import jax
import numpy as np

from tests import toy
from tests.contracts.table_of_drafters import VOCAB_SIZE

TARGET = toy.toy(VOCAB_SIZE)
TARGET_PARAMS = toy.toy_params(VOCAB_SIZE, seed=11)
PREFIXES = [[1, 2, 3, 1, 2], [2], [4, 4], [0, 3, 0, 3, 0, 3], [1, 0, 2, 1]]
LLAMA = toy.llama(VOCAB_SIZE)
LLAMA_PARAMS = toy.llama_params(toy.llama_config(VOCAB_SIZE), seed=12, scale=3)


def prompts_of(copies: int = 4, **fields):
  """All prompts, several times: rows with different random keys."""
  return toy.prompt(PREFIXES * copies, **fields)


def check_counters(output, prefixes):
  """What holds between the counters of any decode."""
  counters = jax.tree.map(np.asarray, output.statistics)
  lengths = np.array([len(prefix) for prefix in prefixes])
  np.testing.assert_array_equal(counters.num_tokens, output.lengths - lengths)
  accepted, tested = counters.num_accepted, counters.num_tested
  assert (accepted <= tested).all()
  assert (tested[:, 1:] <= accepted[:, :-1]).all()
  assert (tested.sum(1) <= counters.num_drafted).all()
  assert (tested[:, 0] <= counters.num_target_runs).all()
  # Each run commits what it accepted and one more, unless the last was cut.
  cut = accepted.sum(1) + counters.num_target_runs - counters.num_tokens
  assert ((cut == 0) | (cut == 1)).all()
  assert (counters.num_target_runs[counters.num_tokens == 0] == 0).all()
