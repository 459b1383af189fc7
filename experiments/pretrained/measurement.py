"""What a pair of models does on a whole test split."""

import dataclasses
import datetime
import functools
import hashlib
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from specdec_jax import drafters, logits, verification
from specdec_jax.base import Drafter, LanguageModel, Params, Prompt
from specdec_jax.checkpoints import loading
from specdec_jax.checkpoints.loading import LoadedModel
from specdec_jax.decoding import autoregressive, speculative
from specdec_jax.infer import examples, quality
from specdec_jax.infer.examples import Layout, Row
from specdec_jax.measure import calibration, stopwatch
from specdec_jax.models import families
from specdec_jax.text import tasks, vocabularies

Figures = dict[str, Any]
# Sources are padded to a multiple of this; shorter texts to this.
_WIDTH = 64
TEMPERATURES = {'greedy': 0.0, 'sampled': 1.0}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Draft:
  """A drafter.

  Attributes:
    name: as it was given.
    params: its weights.
    model: a draft model, or None for a Spec-Drafter.
    make: `(gamma, logits_to_probs) -> Drafter`.
  """

  name: str
  params: Any
  model: LanguageModel | None
  make: Callable[[int, Any], Drafter]


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
    target: the target and its vocabulary.
    layout: of its prompts.
    batches: the whole split.
  """

  target: LoadedModel
  layout: Layout
  batches: Sequence[Batch]

  @property
  def model(self) -> LanguageModel:
    return families.language_model(self.target.config)

  def sampled(self, temperature: float) -> Any:
    return logits.standardize(
      temperature=temperature, vocab_size=self.target.vocabulary.vocab_size
    )


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
  model = loading.load(target)
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
    pack = examples.packer(dataclasses.replace(layout, inputs_length=width))
    prompt = pack([*part, *[None] * (batch_size - len(part))])
    batches.append(Batch(prompt=jax.tree.map(jnp.asarray, prompt), rows=part))
  return Setting(target=model, layout=layout, batches=batches)


def read_draft(name: str, setting: Setting) -> Draft:
  """Loads a draft model or a Spec-Drafter.

  Raises:
    ValueError: if it does not fit the target.
  """
  vocabulary = setting.target.vocabulary
  if loading.is_drafter(loading.locate(name)):
    config, params = loading.read_drafter(name)
    if families.of(config).block_model is None:
      raise ValueError(f'{name} is no Spec-Drafter')
    network = families.block_model(config)

    def make_block(gamma: int, logits_to_probs: Any) -> Drafter:
      del logits_to_probs  # It drafts the likeliest.
      return drafters.spec_drafter(
        network, gamma=gamma, vocab_size=vocabulary.vocab_size
      )

    return Draft(name=name, params=params, model=None, make=make_block)
  loaded = loading.load(name)
  vocabularies.check_same_vocabulary(vocabulary, loaded.vocabulary)
  model = families.language_model(loaded.config)

  def make(gamma: int, logits_to_probs: Any) -> Drafter:
    return drafters.autoregressive(
      model, gamma=gamma, logits_to_probs=logits_to_probs
    )

  return Draft(name=name, params=loaded.params, model=model, make=make)


def plainly(setting: Setting, temperature: float) -> Decoded:
  """The target's own texts."""
  return _decode(
    setting,
    Params(setting.target.params),
    functools.partial(
      autoregressive.generate,
      logits_to_probs=setting.sampled(temperature),
    ),
  )


def speculatively(setting: Setting, draft: Draft, gamma: int) -> Decoded:
  """Greedy texts with a drafter."""
  greedy = setting.sampled(0.0)
  return _decode(
    setting,
    Params(setting.target.params, draft.params),
    functools.partial(
      speculative.generate,
      drafter=draft.make(gamma, greedy),
      verify_fn=verification.speculative_sampling,
      logits_to_probs=greedy,
    ),
  )


def _decode(
  setting: Setting, params: Params, generate: Callable[..., Any]
) -> Decoded:
  """All batches; one program a width."""

  @jax.jit
  def decode(params: Params, prompt: Prompt) -> Any:
    return generate(
      params,
      jax.random.key(0),
      prompt,
      target=setting.model,
      max_len=prompt.decoder_tokens.shape[1] + setting.layout.targets_length,
      eos_id=setting.target.vocabulary.eos_ids,
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
      'tested': found.num_tested.sum(1),
      'accepted': found.num_accepted.sum(1),
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
  """The new text of every row."""
  vocabulary, layout = setting.target.vocabulary, setting.layout
  result = []
  rows = [row for batch in setting.batches for row in batch.rows]
  for row, tokens in zip(rows, decoded.texts, strict=True):
    start = len(layout.starts)
    if not layout.is_encoder_decoder:
      start += len(row.ids)
    ids = [int(i) for i in tokens[start:] if i not in vocabulary.eos_ids]
    result.append(vocabulary.decode(ids))
  return result


def judge(setting: Setting, decoded: Decoded, metric: str) -> Figures:
  """A metric of `quality.METRICS` on the whole split."""
  targets = [row.example.targets for b in setting.batches for row in b.rows]
  if None in targets:
    raise ValueError('the task has no targets to judge by')
  return quality.METRICS[metric](targets, predictions(setting, decoded))


def alphas(
  setting: Setting,
  drafts: Sequence[Draft],
  decoded: Decoded,
  temperature: float,
) -> tuple[np.ndarray, np.ndarray]:
  """`calibration.row_sums` of all rows: `[D, R]` and `[R]`."""
  models, layout = [draft.model for draft in drafts], setting.layout
  row_sums = jax.jit(
    functools.partial(
      calibration.row_sums,
      target=setting.model,
      draft_models=models,
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
    found = row_sums(params, batch.prompt, tokens, lengths)
    found_sums, found_counts = jax.device_get(found)
    sums.append(found_sums[:, :num_rows])
    counts.append(found_counts[:num_rows])
  return np.concatenate(sums, axis=1), np.concatenate(counts)


def nats_per_token(
  setting: Setting, task: str, inputs_field: str, *, max_length: int = 256
) -> Figures:
  """Of a language model, on the texts of a split, each ended by EOS and cut to
  `max_length` tokens."""
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
    laws = jax.nn.log_softmax(found, axis=-1)
    return jnp.take_along_axis(laws, tokens[:, 1:, None], axis=-1)[..., 0]

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
  """The task's name without folders of this machine; its checksum, and where
  and when it was measured since `started`, of `time.time()`."""
  path = Path(task)
  day = datetime.datetime.fromtimestamp(started, datetime.UTC)
  return f'{path.parent.name}/{path.name}', {
    'sha256': hashlib.sha256(path.read_bytes()).hexdigest(),
    'device': f'{stopwatch.device_name()}, jax {jax.__version__}, float32',
    'date': day.strftime('%Y-%m-%d'),
    'seconds': round(time.time() - started),
  }
