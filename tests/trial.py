"""Decoding the same prompts many times, and counting what comes out."""

import functools
import importlib
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import numpy as np
import pytest

from specdec_jax import lazy
from specdec_jax.base import (
  Context,
  Drafter,
  LanguageModel,
  Params,
  Processors,
  VerifyFn,
)
from specdec_jax.decoding import speculative
from specdec_jax.decoding.method import Method
from specdec_jax.decoding.statistics import Statistics
from specdec_jax.sampling import logits, processors
from tests import goodness_of_fit, toy, toy_grammar
from tests.proof_report import record

if TYPE_CHECKING:
  from specdec_jax.audit import Report

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
    processors: of each prompt, what changes logits by the text before them.
    grammars: of each prompt, likewise, as `toy_grammar.of_rows` takes them.
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
  processors: Processors | None = None
  grammars: tuple[str | None, ...] | None = None


class Result(NamedTuple):
  """The audit of a trial's output, and the counters of its decodes."""

  report: 'Report'
  statistics: Statistics


def run(
  trial: Trial,
  *,
  num_decodes: int = NUM_DECODES,
  batch_size: int = 2**15,
  seed: int = 0,
) -> Result:
  """Audits `num_decodes` decodes through the compiled loop, of batches in which
  prompts take turns; skips the test without the extra that audits them."""
  if not lazy.is_installed('specdec_jax.audit'):
    pytest.skip('needs the extra audit')
  audit = importlib.import_module('specdec_jax.audit')
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
  drawn: list[list[np.ndarray]] = [[] for _ in range(num_prompts)]
  per_batch = []
  once = toy.prompt(
    trial.prompts, max_lengths=limits, encoder_rows=trial.encoder_rows
  )
  once = once.replace(processors=trial.processors)
  if trial.grammars is not None:
    once = once.replace(grammar=toy_grammar.of_rows(*trial.grammars))
  prompts = jax.tree.map(lambda x: np.asarray(x)[which], once)
  for start in range(0, num_decodes, batch_size):
    row_ids = np.arange(start, start + batch_size, dtype=np.int32)
    output = decode(params, rng_key, prompts.replace(row_ids=row_ids))
    for i, rows in enumerate(drawn):
      rows.append(_continuations(trial, i, output, which == i))
    per_batch.append(jax.tree.map(np.asarray, output.statistics))
  statistics = jax.tree.map(lambda *a: np.concatenate(a), *per_batch)
  # To the audit a prompt is its number, which its encoder's row belongs to.
  report = audit.audit(
    lambda prompt, num, seed: np.concatenate(drawn[prompt[0]]),
    lambda prefix: _teacher(trial, prefix[0])(prefix[1:]),
    [(i,) for i in range(num_prompts)],
    num_tokens=trial.num_new,
    seeds=(seed,),
    eos_ids=(trial.eos_id,),
    false_alarm_rate=goodness_of_fit.FALSE_ALARM_RATE,
  )
  return Result(report, statistics)


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
  result = run(trial, num_decodes=num_decodes, batch_size=12_600)
  report_audit(
    record_property, table, result.report, configuration=configuration
  )
  assert result.report.verdict == 'not rejected'
  return result


def report_audit(
  record_property: Any, table: str, report: 'Report', **cells: Any
) -> None:
  """Adds a row to a table of the proof: of all tests of an audit the least p,
  and of those with anything to test the largest distances."""
  tests = [check for check in report.checks if check.test.degrees]
  whole = [c.test.num_draws for c in report.checks if 'sequences' in c.name]
  record(
    record_property,
    table,
    **cells,
    decodes=sum(whole),
    tests=len(report.checks),
    p=report.p_value,
    seen_from=max(check.detectable for check in tests),
    bound=max(check.bound for check in tests),
    verdict=report.verdict,
  )


def _continuations(
  trial: Trial, i: int, output: Any, is_own: np.ndarray
) -> np.ndarray:
  """The new tokens of prompt i's rows, which -1 ends."""
  start = len(trial.prompts[i])
  positions = np.arange(start, start + trial.num_new[i])
  tokens = np.asarray(output.tokens)[is_own][:, positions]
  lengths = np.asarray(output.lengths)[is_own, None]
  return np.where(positions < lengths, tokens, -1)


def _teacher(trial: Trial, i: int) -> Callable[..., np.ndarray]:
  """What should follow prompt i; kept, as trials share it."""
  settings = {
    'sampling': trial.sampling,
    'num_new': trial.num_new[i],
    'encoder_row': trial.encoder_rows and trial.encoder_rows[i],
    'forward': trial.forward,
  }
  params = trial.params.target
  key = (
    id(trial.target.extend),
    id(params),
    id(trial.processors),
    trial.grammars,
    trial.prompts[i],
    *settings.values(),
  )
  if key not in _EXACT:
    after = goodness_of_fit.teacher(
      trial.target,
      params,
      trial.prompts[i],
      **settings,
      process=functools.partial(_process, trial, i),
    )
    # What the ids name must outlive them.
    _EXACT[key] = (after, trial)
  return _EXACT[key][0]


def _process(
  trial: Trial, i: int, fed: np.ndarray, logits: np.ndarray
) -> np.ndarray:
  """Logits `[N, T, V]` of prompt i, processed as by plain decoding."""
  if trial.grammars is not None:
    return _within(trial.grammars[i], len(trial.prompts[i]), fed, logits)
  if trial.processors is None:
    return logits
  rows = jax.tree.map(lambda x: x[np.full(len(fed), i)], trial.processors)
  starts = np.full(len(fed), len(trial.prompts[i]), np.int32)
  # One width for all prompts, so that one program serves them.
  width = max(map(len, trial.prompts)) + max(trial.num_new)
  tokens = np.pad(fed, ((0, 0), (0, width - fed.shape[1])))
  made = []
  for position in range(logits.shape[1]):
    text = Context(
      tokens=tokens,
      lengths=np.full_like(starts, position + 1),
      processors=rows,
      starts=starts,
    )
    made.append(_after_text(logits[:, position], text))
  return np.stack(made, axis=1)


_after_text = jax.jit(processors.after_text)
_EXACT: dict[tuple, tuple] = {}


def _within(
  grammar: str | None, start: int, fed: np.ndarray, logits: np.ndarray
) -> np.ndarray:
  """The same of a grammar, each text of which is read from its start."""
  logits = np.array(logits)
  for row, tokens in enumerate(fed):
    for position in range(start - 1, logits.shape[1]):
      text = tuple(tokens[start : position + 1].tolist())
      may_come = toy_grammar.may_come(grammar, text)
      logits[row, position, ~may_come] = -np.inf
  return logits
