"""Computes the logits of whole texts in pieces, and compares them with what
Hugging Face transformers computed for the texts."""

import jax.numpy as jnp
import numpy as np

from specdec_jax import trees
from specdec_jax.base import LanguageModel, Params, Prompt, Tree
from tests import toy

ATOL = 1e-4
# The nodes of a tree that have the text's tokens: the root, the second of its
# children, and so on.
_TREE, _PATH = Tree((0, 0, 1, 2, 2, 5)), [0, 2, 5, 6]


def prompt_of(ids: np.ndarray, starts: np.ndarray, encoder_rows=None) -> Prompt:
  """The first tokens of each row, after the encoder's."""
  rows = [row[:n].tolist() for row, n in zip(ids, starts, strict=True)]
  return toy.prompt(rows, width=16, encoder_rows=encoder_rows)


def check_ragged_rows(
  model: LanguageModel,
  params: Params,
  prompt: Prompt,
  ids: np.ndarray,
  expected: np.ndarray,
  block: int,
) -> None:
  """Rows go on from the ends of their prompts, `block` tokens per call, each
  call after one with other tokens that is rolled back."""
  length, vocab_size = expected.shape[1:]
  cache = model.init(params, prompt, 2 * length)
  padded = np.pad(ids, ((0, 0), (0, 2 * length)))
  done = np.array(prompt.decoder_lengths) - 1
  while done.min() < length:
    columns = done[:, None] + np.arange(block)
    tokens = jnp.asarray(np.take_along_axis(padded, columns, axis=1))
    _, used = model.extend(params, (tokens + 7) % vocab_size, cache)
    cache = model.rewind(used, jnp.asarray(done))
    logits, cache = model.extend(params, tokens, cache)
    for row, first in enumerate(done):
      stop = min(first + block, length)
      np.testing.assert_allclose(
        logits[row, : max(stop - first, 0)],
        expected[row, first:stop],
        rtol=0,
        atol=ATOL,
      )
    done = np.minimum(done + block, length)
    cache = model.rewind(cache, jnp.asarray(done))


def check_path_in_tree(
  model: LanguageModel,
  params: Params,
  prompt: Prompt,
  ids: np.ndarray,
  expected: np.ndarray,
) -> None:
  """From the ends of the prompts on, the texts are one path of a tree; all
  other nodes have other tokens."""
  cache = model.init(params, prompt, ids.shape[1])
  starts = np.array(prompt.decoder_lengths)
  columns = starts[:, None] - 1 + np.arange(len(_PATH))
  text = np.take_along_axis(ids, columns, axis=1)
  nodes = (text[:, trees.depths(_TREE)] + 7) % expected.shape[2]
  nodes[:, _PATH] = text
  placement = trees.placement(
    _TREE, range(len(_TREE.parents) + 1), cache.lengths, cache.capacity
  )
  logits, _ = model.extend(
    params, jnp.asarray(nodes), cache, placement=placement
  )
  np.testing.assert_allclose(
    logits[:, _PATH],
    np.take_along_axis(expected, columns[..., None], axis=1),
    rtol=0,
    atol=ATOL,
  )
