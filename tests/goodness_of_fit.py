"""Exact distributions by enumeration, and the G-test of counts against one."""

import itertools
from collections.abc import Callable
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
import scipy.stats

from specdec_jax.base import LanguageModel
from tests import toy

FALSE_ALARM_RATE = 1e-9


class Sampling(NamedTuple):
  """The settings of `logits.standardize`, for the reference below."""

  temperature: float = 1.0
  top_k: int | None = None
  top_p: float | None = None
  min_p: float | None = None


def reference_probs(logits: np.ndarray, sampling: Sampling) -> np.ndarray:
  """Standardised sampling in plain numpy, float64 `[..., V]`.

  Written apart from `specdec_jax.logits`; ties are not its business.
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
  return probs / probs.sum(-1, keepdims=True)


def sequences(vocab_size: int, length: int) -> np.ndarray:
  """Every sequence of `length` tokens, int32 `[V**length, length]`."""
  every = itertools.product(range(vocab_size), repeat=length)
  return np.array(list(every), np.int32).reshape(-1, length)


def encode(tokens: np.ndarray, counts: np.ndarray, vocab_size: int):
  """A number for each row of new tokens `[N, W]`, of which `counts[N]` are."""
  width = tokens.shape[1]
  digits = np.where(np.arange(width) < counts[:, None], tokens, vocab_size)
  return digits @ (vocab_size + 1) ** np.arange(width)


def exact_distribution(
  model: LanguageModel,
  params,
  prompt: list[int],
  *,
  sampling: Sampling,
  num_new: int,
  width: int,
  eos_id: int,
  encoder_row: tuple[int, ...] | None = None,
  forward: Callable[..., np.ndarray] | None = None,
) -> np.ndarray:
  """The distribution of what follows `prompt`: teacher-forces every sequence.

  Returns:
    float64 `[(V+1)**width]`, indexed by `encode`: at most `num_new` tokens, cut
    after the first EOS.
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
  probs = reference_probs(logits, sampling)[:, len(prompt) - 1 :]
  probs = np.take_along_axis(probs, every[..., None], axis=-1)[..., 0]
  is_eos = every == eos_id
  counts = np.where(is_eos.any(1), is_eos.argmax(1) + 1, num_new)
  is_new = np.arange(num_new) < counts[:, None]
  # Of all sequences that agree up to the EOS, one stands for the rest.
  stands = np.all((every == 0) | is_new, axis=1)
  weights = np.where(is_new, probs, 1.0).prod(1) * stands
  padded = np.pad(every, ((0, 0), (0, width - num_new)))
  codes = encode(padded, counts, vocab_size)
  size = (vocab_size + 1) ** width
  return np.bincount(codes, weights=weights, minlength=size)


class GTest(NamedTuple):
  """A likelihood-ratio test of counts against a distribution.

  Attributes:
    statistic: 2 sum O ln(O / E); infinite if the impossible was seen.
    degrees: degrees of freedom.
    threshold: the statistic beyond which the distribution is rejected.
    p_value: chance of a larger statistic under the distribution.
    num_samples: how many decodes.
  """

  statistic: float
  degrees: int
  threshold: float
  p_value: float
  num_samples: int

  @property
  def is_rejected(self) -> bool:
    return self.statistic > self.threshold


def g_test(
  counts: np.ndarray, probs: np.ndarray, *, min_expected: float = 5.0
) -> GTest:
  """Tests counts `[R, K]` against distributions `[R, K]`, row by row.

  Outcomes that are expected fewer than `min_expected` times are pooled, row by
  row; a pool that is itself rare joins the row's likeliest outcome.
  """
  statistic, degrees = 0.0, 0
  for observed, p in zip(counts, probs, strict=True):
    if observed[p == 0].any():
      statistic = np.inf
    observed, p = observed[p > 0], p[p > 0]
    expected = p / p.sum() * observed.sum()
    is_rare = expected < min_expected
    pool = np.array([expected[is_rare].sum(), observed[is_rare].sum()])
    expected, observed = expected[~is_rare], observed[~is_rare].astype(float)
    if pool[0] >= min_expected:
      expected = np.append(expected, pool[0])
      observed = np.append(observed, pool[1])
    else:
      expected[expected.argmax()] += pool[0]
      observed[expected.argmax()] += pool[1]
    seen = observed > 0
    terms = observed[seen] * np.log(observed[seen] / expected[seen])
    statistic += 2 * terms.sum()
    degrees += len(expected) - 1
  threshold = scipy.stats.chi2.isf(FALSE_ALARM_RATE, degrees) if degrees else 0
  p_value = scipy.stats.chi2.sf(statistic, degrees) if degrees else 1.0
  return GTest(
    float(statistic), degrees, float(threshold), float(p_value), counts.sum()
  )
