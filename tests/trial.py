"""Decoding the same prompts many times, and counting what comes out."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import numpy as np

from specdec_jax import logits
from specdec_jax.base import Drafter, LanguageModel, Params, VerifyFn
from specdec_jax.decoding import speculative
from specdec_jax.decoding.method import Method
from specdec_jax.decoding.statistics import Statistics
from tests import goodness_of_fit, toy
from tests.proof_report import record

NUM_DECODES = 2**17


class Trial(NamedTuple):
  """A way of decoding, whose output should follow the target's distribution.

  Attributes:
    target: the model.
    params: weights of target and drafter.
    drafter: the source of guesses.
    verify_fn: the rule.
    sampling: how the target is sampled.
    prompts: rows take turns in continuing these.
    num_new: the most new tokens of each prompt.
    eos_id: ends a row; -1 none.
    encoder_rows: what the encoder reads, one for each prompt; or None.
    key_impl: the kind of the random key; None for JAX's default.
    is_nan_after_eos: whether what ends a row is not the id, but that the
      target, a toy, is not a number after it.
    forward: the target's logits `[N, T, V]` of ids `[N, T]`, from its params,
      for the exact distribution; None asks the target itself.
  """

  target: LanguageModel
  params: Params
  drafter: Drafter
  verify_fn: VerifyFn
  sampling: goodness_of_fit.Sampling = goodness_of_fit.Sampling()
  prompts: tuple[tuple[int, ...], ...] = ((1,), (0, 2), (2, 1, 0))
  num_new: tuple[int, ...] = (4, 4, 4)
  eos_id: int = -1
  encoder_rows: tuple[tuple[int, ...], ...] | None = None
  key_impl: str | None = None
  is_nan_after_eos: bool = False
  forward: Callable[..., np.ndarray] | None = None

  @property
  def width(self) -> int:
    return max(self.num_new)


class Result(NamedTuple):
  """The test of a trial's output, and the counters of its decodes."""

  test: goodness_of_fit.GTest
  statistics: Statistics


def run(
  trial: Trial,
  *,
  num_decodes: int = NUM_DECODES,
  batch_size: int = 2**15,
  seed: int = 0,
) -> Result:
  """Tests `num_decodes` decodes through the compiled loop against the exact
  distribution."""
  num_prompts = len(trial.prompts)
  which = np.arange(batch_size) % num_prompts
  limits = [
    len(prompt) + count
    for prompt, count in zip(trial.prompts, trial.num_new, strict=True)
  ]
  decode = jax.jit(
    functools.partial(
      speculative.generate,
      method=Method(
        target=trial.target,
        drafter=trial.drafter,
        verify_fn=trial.verify_fn,
        logits_to_probs=logits.standardize(**trial.sampling._asdict()),
        eos_id=-1 if trial.is_nan_after_eos else trial.eos_id,
      ),
      max_len=max(limits),
    )
  )
  params = trial.params
  if trial.is_nan_after_eos:
    table = params.target['table'].at[:, trial.eos_id].set(np.nan)
    params = params._replace(target={'table': table})
  rng_key = jax.random.key(seed, impl=trial.key_impl)
  if trial.key_impl is not None:
    # A fresh one holds threefry's words twice; one that was split does not.
    rng_key = jax.random.split(rng_key)[1]
  vocab_size = trial.target.vocab_size
  counts = np.zeros((num_prompts, (vocab_size + 1) ** trial.width), int)
  per_batch = []
  once = toy.prompt(
    trial.prompts, max_lengths=limits, encoder_rows=trial.encoder_rows
  )
  prompts = jax.tree.map(lambda x: np.asarray(x)[which], once)
  for start in range(0, num_decodes, batch_size):
    row_ids = np.arange(start, start + batch_size, dtype=np.int32)
    output = decode(params, rng_key, prompts.replace(row_ids=row_ids))
    counts += _count(trial, which, output)
    per_batch.append(jax.tree.map(np.asarray, output.statistics))
  exact = np.stack([_exact(trial, i) for i in range(num_prompts)])
  statistics = jax.tree.map(lambda *a: np.concatenate(a), *per_batch)
  return Result(goodness_of_fit.g_test(counts, exact), statistics)


def check(
  trial: Trial,
  record_property: Any,
  table: str,
  configuration: str,
  *,
  num_decodes: int,
) -> Result:
  """Runs a trial, reports it as a row of a table of the proof, and asserts that
  its output follows the target's distribution."""
  result = run(trial, num_decodes=num_decodes, batch_size=25_200)
  test = result.test
  record(
    record_property,
    table,
    configuration=configuration,
    decodes=int(test.num_samples),
    G=test.statistic,
    degrees=test.degrees,
    threshold=test.threshold,
    p=test.p_value,
    verdict='REJECTED' if test.is_rejected else 'same distribution',
  )
  assert not test.is_rejected
  assert test.num_samples >= num_decodes
  return result


def _count(trial: Trial, which: np.ndarray, output: Any) -> np.ndarray:
  """How often each sequence followed each prompt, int `[R, K]`."""
  starts = np.array([len(prompt) for prompt in trial.prompts])[which]
  tokens, lengths = np.asarray(output.tokens), np.asarray(output.lengths)
  positions = starts[:, None] + np.arange(trial.width)
  positions = np.minimum(positions, tokens.shape[1] - 1)
  new = np.take_along_axis(tokens, positions, axis=1)
  codes = goodness_of_fit.encode(new, lengths - starts, trial.target.vocab_size)
  size = (trial.target.vocab_size + 1) ** trial.width
  num_codes = len(trial.prompts) * size
  flat = np.bincount(which * size + codes, minlength=num_codes)
  return flat.reshape(-1, size)


def _exact(trial: Trial, i: int) -> np.ndarray:
  """The exact distribution after prompt i; kept, as trials share it."""
  settings = {
    'sampling': trial.sampling,
    'num_new': trial.num_new[i],
    'width': trial.width,
    'eos_id': trial.eos_id,
    'encoder_row': trial.encoder_rows and trial.encoder_rows[i],
    'forward': trial.forward,
  }
  params = trial.params.target
  key = (
    id(trial.target.extend),
    id(params),
    trial.prompts[i],
    *settings.values(),
  )
  if key not in _EXACT:
    probs = goodness_of_fit.exact_distribution(
      trial.target, params, list(trial.prompts[i]), **settings
    )
    # What the ids name must outlive them.
    _EXACT[key] = (probs, trial.target, params)
  return _EXACT[key][0]


_EXACT: dict[tuple, tuple] = {}
