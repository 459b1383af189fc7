"""Engines as the two functions that `specdec_jax.audit` takes."""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from specdec_jax.files.require import require

Tokens = tuple[int, ...]
VOCAB_SIZE, NUM_TOKENS, GAMMA, TOP_K = 8, 4, 3, 3
# Prompts repeat, so that prompt lookup finds something.
ONE = ((1, 2, 1, 2, 1),)
FOUR = (*ONE, (3,), (5, 4), (6, 7, 6))
SETTINGS = {'T 1': None, f'top-k {TOP_K}': TOP_K}
package = functools.partial(require, extra='audit', purpose='the audit')


class Way(NamedTuple):
  """A way in which an engine samples.

  Attributes:
    name: what drafts, the setting and the batch.
    sample: see `audit`.
    next_probs: see `audit`.
    prompts: to be continued.
    num_draws: per prompt and seed; fewer where an engine is slow.
    greedy: see `audit`.
    eos_ids: see `audit`.
  """

  name: str
  sample: Callable[[Tokens, int, int], Any]
  next_probs: Callable[[Tokens], np.ndarray]
  prompts: Sequence[Tokens]
  num_draws: int
  greedy: Callable[[Tokens], Sequence[int]] | None = None
  eos_ids: Sequence[int] = ()


@functools.cache
def tables() -> tuple[np.ndarray, np.ndarray]:
  """A target and a drafter as logits by the last token, float32 `[V, V]`."""
  rng = np.random.default_rng(1)
  target = 1.5 * rng.normal(size=(VOCAB_SIZE, VOCAB_SIZE))
  draft = target + 0.8 * rng.normal(size=target.shape)
  return target.astype(np.float32), draft.astype(np.float32)


def probs_of(logits: np.ndarray, top_k: int | None = None) -> np.ndarray:
  """The softmax of the `top_k` largest logits `[V]`, in float64."""
  logits = np.asarray(logits, np.float64)
  if top_k is not None:
    logits = np.where(logits >= np.sort(logits)[-top_k], logits, -np.inf)
  weights = np.exp(logits - logits.max())
  return weights / weights.sum()


def of_table(top_k: int | None) -> Callable[[Tokens], np.ndarray]:
  """The probabilities of the table's next token."""
  return lambda prefix: probs_of(tables()[0][prefix[-1]], top_k)


def by_prompt(
  draw: Callable[[int, int], np.ndarray], prompts: Sequence[Tokens]
) -> Callable[[Tokens, int, int], np.ndarray]:
  """`sample` of an engine that continues all prompts in one batch.

  Args:
    draw: `(num, seed)` to continuations `[num, len(prompts), L]`.
    prompts: in the order of the batch.
  """
  draw = functools.cache(draw)
  return lambda prompt, num, seed: draw(num, seed)[:, prompts.index(prompt)]
