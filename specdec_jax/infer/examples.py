"""From examples to rows of tokens, and from rows to prompts."""

import dataclasses
import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

import numpy as np

from specdec_jax.assembly import packed_settings, running, text_settings
from specdec_jax.assembly.text_settings import DRAWN, TextSettings
from specdec_jax.base import Prompt
from specdec_jax.infer import marks
from specdec_jax.models import families
from specdec_jax.text import prompts
from specdec_jax.text.tasks import Example, Task
from specdec_jax.text.vocabulary_files import AnyVocabulary


@dataclasses.dataclass(frozen=True, kw_only=True)
class Row:
  """The tokens of an example.

  Attributes:
    index: of the example in the task; determines the row's random stream.
    example: the example.
    ids: input tokens, without those beyond the limit.
    num_cut: how many input tokens were beyond the limit.
    targets: tokens of the targets, if they are scored.
  """

  index: int
  example: Example
  ids: tuple[int, ...]
  num_cut: int
  targets: tuple[int, ...] = ()


@dataclasses.dataclass(frozen=True, kw_only=True)
class Layout:
  """How examples become tokens and prompts.

  Attributes:
    config: of the target.
    vocabulary: of the target.
    inputs_length: the most input tokens of a row.
    targets_length: the most new tokens of a row.
    is_scored: whether the new tokens are the targets of the example.
    samplings: sampling by the settings of an example, as JSON; those of an
      example without settings are '{}'.
  """

  config: families.Config
  vocabulary: AnyVocabulary
  inputs_length: int
  targets_length: int
  is_scored: bool = False
  samplings: Mapping[str, TextSettings] = dataclasses.field(
    default_factory=lambda: {'{}': TextSettings()}
  )

  @property
  def is_encoder_decoder(self) -> bool:
    return families.has_encoder(self.config)

  @property
  def starts(self) -> tuple[int, ...]:
    """The start tokens of the decoder."""
    return families.of(self.config).starts


def check_lengths(config: families.Config, lengths: Mapping[str, int]) -> None:
  """Raises for TASK_FEATURE_LENGTHS that are no two counts, or too long."""
  if set(lengths) != {'inputs', 'targets'}:
    raise ValueError(
      "TASK_FEATURE_LENGTHS should be {'inputs': N, 'targets': M}, got "
      f'{lengths!r}'
    )
  for name, length in lengths.items():
    running.check_count(f'TASK_FEATURE_LENGTHS: {name}', length)
  limit = families.of(config).max_positions(config)
  needed = prompts.num_positions(config, lengths['inputs'], lengths['targets'])
  if limit is not None and needed > limit:
    raise ValueError(
      f'{lengths["inputs"]} input and {lengths["targets"]} target tokens '
      f'exceed the context of {limit}'
    )


def samplings(task: Task, usual: TextSettings) -> dict[str, TextSettings]:
  """Returns the sampling of a task's examples, by their settings; ValueError
  for a wrong setting, or one that all rows of a batch must share."""
  by_settings = {'{}': usual}
  # A misspelt name is an error even if no example has it.
  text_settings.check_names(task.settings_fields)
  for i, example in enumerate(task.read() if task.settings_fields else (), 1):
    fields = json.loads(example.settings)
    try:
      settings = TextSettings(**fields)
      sampling = settings.over(usual)
      by_settings[example.settings] = sampling
      # The default limits were checked with the rule.
      if not settings.explicit().keys().isdisjoint(DRAWN):
        sampling.check_is_used()
    except (TypeError, ValueError) as error:
      raise ValueError(f'example {i}: {error}') from error
  return by_settings


def are_drawn_alike(samplings: Mapping[str, TextSettings]) -> bool:
  """Returns whether all samplings have the same temperature and limits."""
  drawings = {sampling.drawing for sampling in samplings.values()}
  return len(drawings) == 1


def encode(
  task: Task, layout: Layout, shard_id: int, num_shards: int
) -> Iterator[Row]:
  """Yields the examples whose index is `shard_id` modulo `num_shards`, in
  tokens; ValueError if one has no tokens, tokens unknown to the model, or
  messages that are too long."""
  # Of 3 shards the second has examples 1, 4, 7, ...; `merge` interleaves them.
  for index, example in enumerate(task.read()):
    if index % num_shards == shard_id:
      yield encode_one(index, example, layout)


def encode_one(index: int, example: Example, layout: Layout) -> Row:
  """Returns one example in tokens; raises as `encode` does."""
  ids, eos_ids = example.input_ids, layout.vocabulary.eos_ids
  if ids is None and example.dialogue is not None:
    dialogue = example.dialogue
    try:
      chat_ids = layout.vocabulary.encode_chat(
        dialogue.messages, dialogue.tools, dialogue.template_kwargs
      )
    except ValueError as error:
      raise ValueError(f'example {index + 1}: {error}') from error
    ids = tuple(chat_ids)
  elif ids is None:
    adds = families.of(layout.config).adds_special_tokens(layout.config)
    text_ids = layout.vocabulary.encode(example.inputs, add_special_tokens=adds)
    ids = tuple(text_ids)
  # A decoder's prompt must not end in EOS; an encoder is trained with it.
  elif not layout.is_encoder_decoder and ids and ids[-1] in eos_ids:
    ids = ids[:-1]
  _check_known(index, ids, layout)
  if not ids and not layout.starts:
    raise ValueError(f'example {index + 1} is empty: it has no tokens')
  num_cut = max(0, len(ids) - layout.inputs_length)
  # A chat is not trimmed: its last message and the template's end are needed.
  if num_cut and example.dialogue is not None:
    raise ValueError(
      f'example {index + 1} has messages of {len(ids)} tokens, and '
      f'TASK_FEATURE_LENGTHS has room for {layout.inputs_length}'
    )
  # Texts for an encoder end in EOS; ids of a task are not changed.
  keeps_end = example.input_ids is None and layout.is_encoder_decoder
  return Row(
    index=index,
    example=example,
    ids=_trimmed(ids, layout.inputs_length, eos_ids if keeps_end else ()),
    num_cut=num_cut,
    targets=_target_ids(index, example, layout) if layout.is_scored else (),
  )


def _target_ids(
  index: int, example: Example, layout: Layout
) -> tuple[int, ...]:
  """Returns the targets of an example; a text gets an EOS."""
  ids = example.target_ids
  ends: tuple[int, ...] = ()
  if ids is None:
    if example.targets is None:
      raise ValueError(
        f"example {index + 1} has no targets, and infer.mode 'score' is of them"
      )
    ends = layout.vocabulary.eos_ids
    text_ids = layout.vocabulary.encode(
      example.targets, add_special_tokens=False
    )
    ids = (*text_ids, *ends[:1])
  _check_known(index, ids, layout)
  return _trimmed(ids, layout.targets_length, ends)


def _check_known(index: int, ids: tuple[int, ...], layout: Layout) -> None:
  vocab_size = layout.config.vocab_size
  if unknown := [i for i in ids if not 0 <= i < vocab_size]:
    raise ValueError(
      f'example {index + 1} has token {unknown[0]}, and the model has ids from '
      f'0 to {vocab_size - 1}: the task has another vocabulary'
    )


def _trimmed(
  ids: tuple[int, ...], limit: int, ends: tuple[int, ...]
) -> tuple[int, ...]:
  """Returns the first `limit` tokens; if the last of all is one of `ends`, it
  stays the last."""
  # Texts keep their EOS when they are trimmed, as with `append_eos_after_trim`
  # in T5's own tasks. Where a task gives tokens, its preprocessors decide on
  # EOS, and T5X trims whatever they give. [5 6 7 8 1] with limit 4 is [5 6 7 1]
  # for a text, else [5 6 7 8].
  if len(ids) <= limit:
    return ids
  end = ids[-1:] if ids[-1] in ends else ()
  return ids[: limit - len(end)] + end


def sampled(rows: Sequence[Row], num_samples: int) -> list[Row]:
  """Repeats each row `num_samples` times, each with its own random stream."""
  return [
    # With 3 samples, example 7 is rows 21, 22 and 23.
    dataclasses.replace(row, index=row.index * num_samples + i)
    for row in rows
    for i in range(num_samples)
  ]


def packer(layout: Layout) -> Callable[[Sequence[Row | None]], Prompt]:
  """Makes the function from rows, or None, to a prompt of numpy arrays."""
  numbers = {settings: i for i, settings in enumerate(layout.samplings)}
  samplings = [*layout.samplings.values()]
  is_alike = are_drawn_alike(layout.samplings)
  process = packed_settings.packer(
    samplings,
    eos_ids=layout.vocabulary.eos_ids,
    vocab_size=layout.config.vocab_size,
    vocabulary=layout.vocabulary,
  )

  def pack(rows: Sequence[Row | None]) -> Prompt:
    prompt = prompts.pack(
      [None if row is None else row.ids for row in rows],
      config=layout.config,
      width=layout.inputs_length,
      max_new_tokens=layout.targets_length,
      row_ids=[0 if row is None else row.index for row in rows],
    )
    setting_ids = [
      0 if row is None else numbers[row.example.settings] for row in rows
    ]
    prompt = process(setting_ids, prompt)
    if is_alike:
      return prompt
    drawn = packed_settings.sampling_of_rows(
      [samplings[i] for i in setting_ids], len(rows)
    )
    return dataclasses.replace(prompt, sampling=drawn)

  return pack


def pack_targets(
  rows: Sequence[Row | None], layout: Layout
) -> tuple[np.ndarray, np.ndarray]:
  """Packs targets, int32 `[B, T]` and 0 beyond their lengths `[B]`."""
  targets = [() if row is None else row.targets for row in rows]
  # Targets [5, 6] are [5, 6, 0, 0] where the longest have 4 tokens.
  tokens = np.zeros((len(rows), layout.targets_length), np.int32)
  for row, ids in zip(tokens, targets, strict=True):
    row[: len(ids)] = ids
  return tokens, np.array([len(ids) for ids in targets], np.int32)


def digest(rows: Iterable[Row]) -> str:
  """Digests what the model reads of rows, and what results contain of them."""

  def one(row: Row) -> str:
    # Messages rather than tokens: a template may add the current date.
    source = row.example.dialogue or row.ids
    contents: tuple[object, ...] = (row.index, source, row.example.fields())
    contents += (row.targets,) if row.targets else ()
    contents += (row.example.settings,) if row.example.settings != '{}' else ()
    return hashlib.sha256(repr(contents).encode()).hexdigest()

  return marks.add_digests(map(one, rows))
