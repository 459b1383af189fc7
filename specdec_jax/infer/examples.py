"""From examples to prompts, and from decoded rows to JSON and to a report."""

import dataclasses
import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from specdec_jax.base import Prompt
from specdec_jax.decoding.state import DecodeOutput
from specdec_jax.infer import decode_many, output
from specdec_jax.infer.decode_many import Timed
from specdec_jax.measure import metrics
from specdec_jax.models import families
from specdec_jax.models.families import Config, has_encoder
from specdec_jax.text import prompts
from specdec_jax.text.tasks import Example, Task
from specdec_jax.text.vocabulary_files import AnyVocabulary


@dataclasses.dataclass(frozen=True, kw_only=True)
class Row:
  """An example in tokens.

  Attributes:
    index: of the example in its task; it names the row's random stream.
    ids: its input tokens, without the last `num_cut` if they were too long.
  """

  index: int
  example: Example
  ids: tuple[int, ...]
  num_cut: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class Layout:
  """The sizes of prompts made of examples: those of the target, and at most how
  many input tokens and new tokens a row has."""

  config: Config
  vocabulary: AnyVocabulary
  inputs_length: int
  targets_length: int

  @property
  def is_encoder_decoder(self) -> bool:
    return has_encoder(self.config)

  @property
  def starts(self) -> tuple[int, ...]:
    """What the decoder begins with, before any input."""
    return families.of(self.config).starts


def check_lengths(config: Config, lengths: Any) -> dict[str, int]:
  """TASK_FEATURE_LENGTHS. Raises ValueError if one is missing or not a positive
  integer, or both exceed the model's context."""
  if not isinstance(lengths, Mapping) or set(lengths) != {'inputs', 'targets'}:
    raise ValueError(
      "TASK_FEATURE_LENGTHS should be {'inputs': N, 'targets': M}, got "
      f'{lengths!r}'
    )
  for name, length in lengths.items():
    if type(length) is not int or length < 1:
      raise ValueError(f'TASK_FEATURE_LENGTHS: {name} is {length!r}')
  limit = families.of(config).max_positions(config)
  if limit is not None and sum(lengths.values()) > limit:
    raise ValueError(
      f'{lengths["inputs"]} input and {lengths["targets"]} target tokens '
      f'exceed the context of {limit}'
    )
  return dict(lengths)


def encode(
  task: Task, layout: Layout, shard_id: int, num_shards: int
) -> Iterator[Row]:
  """The examples whose index is `shard_id` modulo `num_shards`; ValueError if
  one has no tokens, or tokens unknown to the model."""
  for index, example in enumerate(task.read()):
    if index % num_shards == shard_id:
      yield encode_one(index, example, layout)


def encode_one(index: int, example: Example, layout: Layout) -> Row:
  """One example in tokens; raises as `encode` does."""
  ids = example.input_ids
  if ids is None:
    adds = families.of(layout.config).adds_special_tokens(layout.config)
    ids = tuple(
      layout.vocabulary.encode(example.inputs, add_special_tokens=adds)
    )
  elif not layout.is_encoder_decoder and ids[-1:] == layout.vocabulary.eos_ids:
    ids = ids[:-1]
  if ids and not 0 <= min(ids) <= max(ids) < layout.config.vocab_size:
    raise ValueError(
      f'example {index + 1} has token {max(ids)}, the model '
      f'{layout.config.vocab_size}: the task has another vocabulary'
    )
  if not ids and not layout.starts:
    raise ValueError(f'example {index + 1} is empty: it has no tokens')
  num_cut = max(0, len(ids) - layout.inputs_length)
  if num_cut:
    # Texts keep their EOS when they are trimmed, as with the
    # `append_eos_after_trim` of T5's own tasks. Of a task that brings tokens,
    # preprocessors decide on EOS, and T5X trims whatever they leave.
    keeps_end = (
      example.input_ids is None
      and layout.is_encoder_decoder
      and ids[-1:] == layout.vocabulary.eos_ids
    )
    end = ids[-1:] if keeps_end else ()
    ids = ids[: layout.inputs_length - len(end)] + end
  return Row(index=index, example=example, ids=ids, num_cut=num_cut)


def packer(layout: Layout) -> Callable[[Sequence[Row | None]], Prompt]:
  """The function from rows, or None to fill, to a prompt of numpy arrays."""
  return lambda rows: prompts.pack(
    [None if row is None else row.ids for row in rows],
    config=layout.config,
    width=layout.inputs_length,
    max_new_tokens=layout.targets_length,
    row_ids=[0 if row is None else row.index for row in rows],
  )


def digest(rows: Iterable[Row]) -> str:
  """A digest of what the model reads of rows, and of what is written of them;
  see `output.add_digests`."""
  return output.add_digests(
    hashlib.sha256(
      repr((row.index, row.ids, row.example.fields())).encode()
    ).hexdigest()
    for row in rows
  )


def record(row: Row, output: DecodeOutput, layout: Layout) -> dict[str, Any]:
  """A line of the results, as T5X writes it, of an output of one row:
  `inputs`, the texts of the example; `prediction`; and `aux`: the counters and
  rates of `measure.metrics.row_summary`, `log_prob` of all new tokens together,
  to four decimals, and how the row ended: `'eos'`, `'length'` or `'nan'`.
  """
  start = len(layout.starts)
  if not layout.is_encoder_decoder:
    start += len(row.ids)
  span = slice(start, int(output.lengths[0]))
  tokens = output.tokens[0, span].tolist()
  eos_ids = layout.vocabulary.eos_ids
  end = 'eos' if tokens and tokens[-1] in eos_ids else 'length'
  return {
    'inputs': row.example.fields(),
    'prediction': layout.vocabulary.decode(
      [token for token in tokens if token not in eos_ids]
    ),
    'aux': {
      **metrics.row_summary(output.statistics, 0),
      # Neighbouring rows can change the last bits, but not these digits.
      'log_prob': round(float(output.log_probs[0, span].sum()), 4),
      'end': 'nan' if output.has_nan[0] else end,
    },
  }


def counts(rows: Sequence[Row], records: Sequence[Mapping]) -> dict[str, int]:
  """What a chunk's `.COMPLETED` says of it: the same in every run."""
  aux = [record['aux'] for record in records]
  return {
    'examples': len(rows),
    'trimmed_examples': sum(row.num_cut > 0 for row in rows),
    'trimmed_tokens': sum(row.num_cut for row in rows),
    'tokens': sum(each['tokens'] for each in aux),
    'target_runs': sum(each['target_runs'] for each in aux),
    'nan_examples': sum(each['end'] == 'nan' for each in aux),
  }


def sentences(
  total: Mapping[str, int], chunks: Sequence[Timed], inputs_length: int
) -> list[str]:
  """The last lines of a run: of `counts` of all chunks, and those that this run
  decoded."""
  lines = []
  if chunks:
    timed = decode_many.together(chunks)
    figures = timed.figures()
    shown = {
      'tokens_per_target_run': '{:.2f} tokens per target run',
      'alpha': 'alpha {:.2f}',
      'row_utilisation': 'rows used {:.0%}',
    }
    parts = [
      f'{timed.statistics.num_tokens.size} examples decoded in '
      f'{timed.seconds:.1f} s: {figures["tokens_per_second"]:.1f} tokens/s',
      *(shown[name].format(figures[name]) for name in shown if name in figures),
    ]
    lines.append(', '.join(parts))
  if total['trimmed_examples']:
    lines.append(
      f'{total["trimmed_examples"]} of {total["examples"]} inputs were longer '
      f'than {inputs_length} tokens and were trimmed by '
      f'{total["trimmed_tokens"]} tokens together'
    )
  if total['nan_examples']:
    lines.append(
      f'error: logits of {total["nan_examples"]} examples were not numbers '
      '(NaN), and their decoding stopped; their "end" is "nan"'
    )
  return lines
