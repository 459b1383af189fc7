"""What should follow a prompt, by enumeration, for `specdec_jax.audit`."""

import itertools
from collections.abc import Callable
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np

from specdec_jax.base import LanguageModel
from tests import toy

FALSE_ALARM_RATE = 1e-9
Tokens = tuple[int, ...]


class Sampling(NamedTuple):
  """The settings of `logits.standardize`, for the reference below."""

  temperature: float = 1.0
  top_k: int | None = None
  top_p: float | None = None
  min_p: float | None = None
  typical_p: float | None = None


def reference_probs(logits: np.ndarray, sampling: Sampling) -> np.ndarray:
  """Standardised sampling in plain numpy, float64 `[..., V]`.

  Written apart from `specdec_jax.sampling.logits`; ties are not its business.
  """
  logits = np.asarray(logits, np.float64)
  if sampling.temperature == 0:
    return np.eye(logits.shape[-1])[logits.argmax(-1)]
  weights = np.exp(
    (logits - logits.max(-1, keepdims=True)) / sampling.temperature
  )
  rank = np.argsort(np.argsort(-weights, axis=-1), axis=-1)
  if sampling.top_k is not None:
    weights = np.where(rank < sampling.top_k, weights, 0)
  probs = weights / weights.sum(-1, keepdims=True)
  if sampling.top_p is not None and sampling.top_p < 1:
    descending = np.sort(probs, axis=-1)[..., ::-1]
    before = np.cumsum(descending, axis=-1) - descending
    num_kept = (before < sampling.top_p).sum(-1, keepdims=True)
    probs = np.where(rank < num_kept, probs, 0)
  if sampling.min_p is not None:
    probs = np.where(
      probs < sampling.min_p * probs.max(-1, keepdims=True), 0, probs
    )
  probs = probs / probs.sum(-1, keepdims=True)
  if sampling.typical_p is not None and sampling.typical_p < 1:
    with np.errstate(divide='ignore', invalid='ignore'):
      surprise = -np.log(probs)
      entropy = np.nansum(probs * surprise, -1, keepdims=True)
    distance = np.abs(surprise - entropy)
    rank = np.argsort(np.argsort(distance, axis=-1), axis=-1)
    ordered = np.take_along_axis(probs, np.argsort(distance, axis=-1), -1)
    before = np.cumsum(ordered, axis=-1) - ordered
    num_kept = (before < sampling.typical_p).sum(-1, keepdims=True)
    probs = np.where(rank < num_kept, probs, 0)
    probs = probs / probs.sum(-1, keepdims=True)
  return probs


def sequences(vocab_size: int, length: int) -> np.ndarray:
  """Every sequence of `length` tokens, int32 `[V**length, length]`."""
  every = itertools.product(range(vocab_size), repeat=length)
  return np.array(list(every), np.int32).reshape(-1, length)


def teacher(
  model: LanguageModel,
  params,
  prompt: Tokens,
  *,
  sampling: Sampling,
  num_new: int,
  encoder_row: Tokens | None = None,
  forward: Callable[..., np.ndarray] | None = None,
  process: Callable[..., np.ndarray] = lambda fed, logits: logits,
) -> Callable[[Tokens], np.ndarray]:
  """Teacher-forces every continuation of a prompt.

  `process` makes what is sampled of the texts `[N, T + 1]` and their logits
  `[N, T, V]`.

  Returns:
    A function from up to `num_new - 1` tokens after the prompt to the
    distribution of the next, float64 `[V]`.
  """
  vocab_size = model.vocab_size
  every = sequences(vocab_size, num_new)
  fed = np.concatenate(
    [np.tile(np.array(prompt, np.int32), (len(every), 1)), every], axis=1
  )
  if forward is not None:
    logits = forward(params, fed[:, :-1])
  else:
    encoder_rows = encoder_row and [list(encoder_row)] * len(every)
    start = toy.prompt([prompt[:1]] * len(every), encoder_rows=encoder_rows)
    model = toy.compiled(model)
    cache = model.init(params, start, fed.shape[1])
    logits, _ = model.extend(params, jnp.asarray(fed[:, :-1]), cache)
  logits = process(fed, np.asarray(logits))
  probs = reference_probs(logits, sampling)[:, len(prompt) - 1 :]
  places = vocab_size ** np.arange(num_new - 1, -1, -1)

  def after(tokens: Tokens) -> np.ndarray:
    # Of four ids and three new tokens, (3, 1) begins row 3 * 16 + 1 * 4.
    row = sum(np.multiply(tokens, places[: len(tokens)]), 0)
    return probs[int(row), len(tokens)]

  return after
