"""Models that have logits of some tokens alone: draft vocabularies."""

import flax.linen as nn
import jax.numpy as jnp
import numpy as np

from specdec_jax.base import Array
from specdec_jax.models.layers import LOGITS
from specdec_jax.models.products import Weights
from specdec_jax.models.quantized import (
  FLOAT32,
  ROWS,
  SCALE,
  TILES,
  TRANSPOSED,
)

# The logit of a token that is not in a draft vocabulary: its probability is 0
# beside any other, and it is drafted where a grammar allows no other.
NEVER = -1e30


def with_logits_of(
  params: Weights, ids: np.ndarray, *, is_tied: bool
) -> Weights:
  """Restricts a model's parameters to logits of the tokens `ids`, `[N]`; it can
  still read any token. Tiles of the logits' kernel are left out."""
  # With 4 tokens and ids [0, 3]: columns 0 and 3 of the kernel [embed, 4], and
  # the same rows of its rows [4, embed].
  cut = {}
  for name, value in params.items():
    if name == LOGITS:
      # Some copies are [V, embed]: all rows, and float32 ones if V is less.
      width = value['kernel'].shape[-1]
      value = {
        leaf: array[ids]
        if leaf.startswith(ROWS) or array.shape[-1] != width
        else array[:, ids]
        for leaf, array in value.items()
        if not leaf.startswith(TILES)
      }
    elif name == TILES + TRANSPOSED:
      continue
    elif isinstance(value, dict) and name != 'encoder':
      value = with_logits_of(value, ids, is_tied=is_tied)
    elif name in (TRANSPOSED, FLOAT32 + TRANSPOSED):
      value = value[:, ids]
    elif name == ROWS + TRANSPOSED:
      value = value[ids]
    cut[name] = value
  if is_tied and 'embedding' in params and TRANSPOSED not in params:
    for end in ('', SCALE):
      if 'embedding' + end in params:
        cut[TRANSPOSED + end] = params['embedding' + end][ids].T
  return cut


def spread(logits: Array, ids: Array | np.ndarray, size: int) -> Array:
  """Scatters logits `[..., N]` to the entries `ids`, `[N]`, of `[..., size]`;
  all others are `NEVER`."""
  # With ids [0, 3], logits [a, b] are [a, NEVER, NEVER, b] of four tokens.
  all_logits = jnp.full((*logits.shape[:-1], size), NEVER, logits.dtype)
  return all_logits.at[..., ids].set(logits)


def num_logits(module: nn.Module, vocab_size: int) -> int:
  """Counts the logits of a module's untied projection: `vocab_size`, or fewer
  after `with_logits_of`."""
  if not module.has_variable('params', LOGITS):
    return vocab_size
  return int(module.get_variable('params', LOGITS)['kernel'].shape[-1])


def check_target_ids(target_ids: Array | np.ndarray, vocab_size: int) -> None:
  """Raises ValueError unless `target_ids`, int32 `[V_draft]`, are distinct
  tokens of a target with `vocab_size`."""
  # numpy's: values are compared on the host, once, when a file is read.
  ids = np.asarray(target_ids)
  if ids.min() < 0 or ids.max() >= vocab_size:
    raise ValueError(
      f'target_ids are from {ids.min()} to {ids.max()}: they should be ids of '
      f'the target, 0 to {vocab_size - 1}'
    )
  # [3, 5, 3] has 3 twice: two logits for one token.
  values, counts = np.unique(ids, return_counts=True)
  if counts.max() > 1:
    raise ValueError(
      f'target_ids have token {values[counts.argmax()]} {counts.max()} times: '
      'they must be unique'
    )
