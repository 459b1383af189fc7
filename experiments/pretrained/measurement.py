"""What a pair of models does on a whole test split."""

import dataclasses
import functools
import hashlib
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from experiments import common, report
from specdec_jax.assembly import lengths, models, usual
from specdec_jax.assembly.drafters import DRAFTERS
from specdec_jax.assembly.models import Model
from specdec_jax.assembly.rules import SpeculativeSampling
from specdec_jax.base import (
  Array,
  LanguageModel,
  LogitsToProbsFn,
  Params,
  Prompt,
)
from specdec_jax.checkpoints.loading import LoadedModel
from specdec_jax.decoding import autoregressive, speculative
from specdec_jax.decoding.method import Method
from specdec_jax.infer import examples, quality
from specdec_jax.infer.examples import Layout, Row
from specdec_jax.launch import platforms
from specdec_jax.models import families
from specdec_jax.sampling import distributions
from specdec_jax.text import tasks

Figures = dict[str, Any]
# Sources are padded to a multiple of this; shorter texts to this.
_WIDTH = 64
DTYPE = 'float32'
RULE = SpeculativeSampling()
TEMPERATURES = {'greedy': 0.0, 'sampled': 1.0}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Draft:
  """A drafter.

  Attributes:
    choice: its config, with the name of its weights.
    params: its weights.
    model: a draft model's functions; None for what only drafts.
  """

  choice: Any
  params: Any
  model: LanguageModel | None

  @property
  def name(self) -> str:
    return self.choice.model.checkpoint


@dataclasses.dataclass(frozen=True, kw_only=True)
class Batch:
  """Rows of like lengths; those beyond `rows` are empty."""

  prompt: Prompt
  rows: Sequence[Row]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Decoded:
  """What came of all batches, in their order.

  Attributes:
    texts: prompt and new tokens of each row, EOS included.
    counters: `[R]` each: `tokens`, `runs`, `tested`, `accepted`.
  """

  texts: Sequence[np.ndarray]
  counters: Mapping[str, np.ndarray]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Setting:
  """What all of a measurement shares.

  Attributes:
    chosen: the target by name.
    target: the target and its vocabulary.
    layout: of its prompts.
    batches: the whole split.
  """

  chosen: Model
  target: LoadedModel
  layout: Layout
  batches: Sequence[Batch]

  @property
  def model(self) -> LanguageModel:
    return families.language_model(self.target.config)

  @property
  def rows(self) -> list[Row]:
    return [row for batch in self.batches for row in batch.rows]

  def sampled(self, temperature: float) -> LogitsToProbsFn:
    target_info = common.target_info(self.target, temperature)
    return target_info.sampling.to_probs(target_info.vocab_size)


def read(
  target: str,
  task: str,
  *,
  inputs_field: str,
  prefix: str = '',
  inputs_length: int,
  max_new_tokens: int,
  batch_size: int,
) -> Setting:
  """Loads the target and makes batches of the split, by length.

  Raises:
    ValueError: if there is no such model or file.
  """
  chosen = Model(checkpoint=target, dtype=DTYPE)
  model = common.load(chosen)
  layout = Layout(
    config=model.config,
    vocabulary=model.vocabulary,
    inputs_length=inputs_length,
    targets_length=max_new_tokens,
  )
  found = tasks.find(task, inputs_field=inputs_field, prefix=prefix)
  rows = sorted(
    examples.encode(found, layout, 0, 1), key=lambda row: len(row.ids)
  )

  def is_short(part: Sequence[Row]) -> bool:
    return len(part[-1].ids) <= _WIDTH

  batches = []
  for start in range(0, len(rows), batch_size):
    part = rows[start : start + batch_size]
    # Two widths, since every one is compiled for.
    longest = max(len(row.ids) for row in (part if is_short(part) else rows))
    width = min(-(-longest // _WIDTH) * _WIDTH, inputs_length)
    room = dataclasses.replace(layout, inputs_length=width)
    prompt = common.pack(room, part, batch_size)
    batches.append(Batch(prompt=prompt, rows=part))
  return Setting(chosen=chosen, target=model, layout=layout, batches=batches)


def read_draft(name: str, setting: Setting) -> Draft:
  """Loads a draft model, or a network that only drafts.

  Raises:
    ValueError: if it does not fit the target.
  """
  drafter = usual.drafter(name)
  choice: Any = DRAFTERS[drafter](model=Model(checkpoint=name, dtype=DTYPE))
  length = lengths.usual(choice.length)
  choice = dataclasses.replace(choice, gamma=lengths.fixed(length))
  config: Any = choice.make(
    common.target_info(setting.target, 0.0), length
  ).config
  params = models.read_params(choice.model, config)
  is_model = drafter == 'model'
  model = families.language_model(config) if is_model else None
  return Draft(choice=choice, params=params, model=model)


def plainly(setting: Setting, temperature: float) -> Decoded:
  """Decodes the target's own texts."""
  generate = functools.partial(
    autoregressive.generate,
    method=Method(
      target=setting.model,
      logits_to_probs=setting.sampled(temperature),
      eos_id=setting.target.vocabulary.eos_ids,
    ),
  )
  return _decode(setting, Params(setting.target.params), generate)


def speculatively(setting: Setting, draft: Draft, gamma: int) -> Decoded:
  """Decodes greedy texts with a drafter."""
  decoder = common.decoder(
    setting.chosen,
    dataclasses.replace(draft.choice, gamma=gamma),
    Params(setting.target.params, draft.params),
    rule=RULE,
  )
  generate = functools.partial(speculative.generate, method=decoder.method)
  return _decode(setting, decoder.params, generate)


def _decode(
  setting: Setting, params: Params, generate: Callable[..., Any]
) -> Decoded:
  """Decodes all batches; one program per width."""

  @jax.jit
  def decode(params: Params, prompt: Prompt) -> Any:
    return generate(
      params,
      jax.random.key(0),
      prompt,
      max_len=prompt.decoder_tokens.shape[1] + setting.layout.targets_length,
    )

  texts: list[np.ndarray] = []
  counters: list[Any] = []
  for batch in setting.batches:
    output = jax.device_get(decode(params, batch.prompt))
    if output.has_nan.any():
      raise ValueError('the logits were not numbers (NaN): nothing to measure')
    for i in range(len(batch.rows)):
      texts.append(output.tokens[i, : output.lengths[i]])
    found = output.statistics
    each = {
      'tokens': found.num_tokens,
      'runs': found.num_target_runs,
      'tested': found.num_tested,
      'accepted': found.num_accepted,
    }
    counters.append({k: v[: len(batch.rows)] for k, v in each.items()})
  return Decoded(
    texts=texts,
    counters={
      name: np.concatenate([each[name] for each in counters])
      for name in counters[0]
    },
  )


def predictions(setting: Setting, decoded: Decoded) -> list[str]:
  """Decodes the new text of every row."""
  vocabulary, layout = setting.target.vocabulary, setting.layout
  result = []
  for row, tokens in zip(setting.rows, decoded.texts, strict=True):
    start = len(layout.starts)
    if not layout.is_encoder_decoder:
      start += len(row.ids)
    ids = [int(i) for i in tokens[start:] if i not in vocabulary.eos_ids]
    result.append(vocabulary.decode(ids))
  return result


def judge(setting: Setting, decoded: Decoded, metric: str) -> Figures:
  """Computes a metric of `quality.METRICS` on the whole split."""
  targets = [row.example.targets for row in setting.rows]
  if None in targets:
    raise ValueError('the task has no targets to judge by')
  return quality.METRICS[metric](targets, predictions(setting, decoded))


def alphas(
  setting: Setting,
  drafts: Sequence[Draft],
  decoded: Decoded,
  temperature: float,
) -> tuple[np.ndarray, np.ndarray]:
  """Computes `row_sums` of all rows: `[D, R]` and `[R]`."""
  layout = setting.layout
  sums_of = jax.jit(
    functools.partial(
      row_sums,
      target=setting.model,
      draft_models=[draft.model for draft in drafts if draft.model],
      logits_to_probs=setting.sampled(temperature),
    )
  )
  params = Params(
    setting.target.params, tuple(draft.params for draft in drafts)
  )
  sums, counts, first = [], [], 0
  for batch in setting.batches:
    num_rows = len(batch.rows)
    texts = decoded.texts[first : first + num_rows]
    first += num_rows
    width = _WIDTH
    if max(map(len, texts)) > width:
      width = batch.prompt.decoder_tokens.shape[1] + layout.targets_length
    tokens = np.zeros((batch.prompt.decoder_lengths.size, width), np.int32)
    lengths = np.ones(len(tokens), np.int32)
    for i, text in enumerate(texts):
      tokens[i, : len(text)] = text
      lengths[i] = len(text)
    found = sums_of(params, batch.prompt, tokens, lengths)
    found_sums, found_counts = jax.device_get(found)
    sums.append(found_sums[:, :num_rows])
    counts.append(found_counts[:num_rows])
  return np.concatenate(sums, axis=1), np.concatenate(counts)


def row_sums(
  params: Params,
  prompt: Prompt,
  tokens: Array,
  lengths: Array,
  *,
  target: LanguageModel,
  draft_models: Sequence[LanguageModel],
  logits_to_probs: LogitsToProbsFn,
) -> tuple[Array, Array]:
  """Sums `sum min(p, q)` over the prefixes of each text; jit it whole.

  What `calibration.overlaps` finds while the target generates, one call per
  token, is found here by one call per text, on the same prefixes for every
  draft model. On the target's own texts, sums over counts are alpha.

  Args:
    params: weights of the target, and in `drafter` those of each draft model.
    prompt: what the texts begin with; it counts for nothing.
    tokens: int32 `[B, S]`, the prompt and what follows it; 0 after the end.
    lengths: int32 `[B]`, with the prompt.
    target: the model that wrote the texts.
    draft_models: D of them.
    logits_to_probs: how all of them are sampled.

  Returns:
    Sums float32 `[D, B]`, and int32 `[B]`, of how many prefixes.
  """
  # From its first token on, so that all rows begin alike.
  start = dataclasses.replace(
    prompt,
    decoder_tokens=tokens[:, :1],
    decoder_lengths=jnp.ones_like(prompt.decoder_lengths),
    max_lengths=None,
  )

  def probs(model: LanguageModel, weights: Any) -> Array:
    cache = model.init(weights, start, tokens.shape[1])
    logits, _ = model.extend(weights, tokens[:, :-1], cache)
    return logits_to_probs(logits)

  p = probs(target, params.target)
  places = jnp.arange(1, tokens.shape[1], dtype=lengths.dtype)[None]
  is_counted = (places >= prompt.decoder_lengths[:, None]) & (
    places < lengths[:, None]
  )
  sums = []
  for model, weights in zip(draft_models, params.drafter, strict=True):
    shared = distributions.overlap(p, probs(model, weights))
    # Sums of float32 probabilities may exceed one by their rounding.
    shared = jnp.where(is_counted, jnp.minimum(shared, 1.0), 0.0)
    sums.append(shared.sum(axis=1))
  return jnp.stack(sums), is_counted.sum(axis=1, dtype=jnp.int32)


def nats_per_token(
  setting: Setting, task: str, inputs_field: str, *, max_length: int = 256
) -> Figures:
  """Measures a language model on the texts of a split, each ended by EOS and
  cut to `max_length` tokens."""
  vocabulary, start = setting.target.vocabulary, setting.layout.starts

  @jax.jit
  def log_probs(params: Any, tokens: Any) -> Any:
    ones = jnp.ones(len(tokens), jnp.int32)
    prompt = Prompt(
      encoder_tokens=None,
      decoder_tokens=tokens[:, :1],
      decoder_lengths=ones,
      row_ids=ones,
    )
    cache = setting.model.init(params, prompt, tokens.shape[1])
    found, _ = setting.model.extend(params, tokens[:, :-1], cache)
    found = jax.nn.log_softmax(found, axis=-1)
    return jnp.take_along_axis(found, tokens[:, 1:, None], axis=-1)[..., 0]

  rows = [
    [*start, *vocabulary.encode(example.inputs, add_special_tokens=True)]
    for example in tasks.find(task, inputs_field=inputs_field).read()
  ]
  rows = sorted((row[: max_length + 1] for row in rows), key=len)
  batch_size = setting.batches[0].prompt.decoder_lengths.size
  total, num_tokens = 0.0, 0
  for first in range(0, len(rows), batch_size):
    part = rows[first : first + batch_size]
    width = -(-len(part[-1]) // _WIDTH) * _WIDTH
    tokens = np.zeros((batch_size, width), np.int32)
    for i, row in enumerate(part):
      tokens[i, : len(row)] = row
    found = np.asarray(log_probs(setting.target.params, tokens), np.float64)
    for i, row in enumerate(part):
      total -= found[i, : len(row) - 1].sum()
      num_tokens += len(row) - 1
  nats = total / num_tokens
  return {'nats_per_token': nats, 'perplexity': float(np.exp(nats))}


def provenance(task: str, started: float) -> tuple[str, Figures]:
  """Says the task's name without folders of this machine; its checksum, and
  where and when it was measured since `started`, of `time.time()`."""
  path = Path(task)
  return f'{path.parent.name}/{path.name}', {
    'sha256': hashlib.sha256(path.read_bytes()).hexdigest(),
    'device': f'{platforms.device_name()}, jax {jax.__version__}, {DTYPE}',
    'date': report.day(started),
    'seconds': round(time.time() - started),
    **report.of_code(),
  }
