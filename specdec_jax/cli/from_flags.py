"""From flags to a decoder and the batches that it decodes."""

import argparse
import dataclasses
import json
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar

from specdec_jax.assembly import (
  decoder,
  gamma_memory,
  packing,
  running,
  usual,
)
from specdec_jax.assembly.drafters import DRAFTERS, DrafterChoice
from specdec_jax.assembly.lengths import Auto
from specdec_jax.assembly.models import Model
from specdec_jax.assembly.option_fields import chosen, field_names
from specdec_jax.assembly.rules import RULES, Rule
from specdec_jax.assembly.sampling import Sampling
from specdec_jax.base import Tree
from specdec_jax.cli import outputs
from specdec_jax.files import text_lines
from specdec_jax.launch import compilation_cache, progress
from specdec_jax.launch.spelling import did_you_mean
from specdec_jax.sharding import mesh
from specdec_jax.text import prompts

Made = TypeVar('Made')
# Keys that a line of prompts may have for the readers of its results.
_LABELS = ('id', 'task')


@dataclasses.dataclass(frozen=True, kw_only=True)
class Choices:
  """The choices that flags make; no model is read yet."""

  model: Model
  drafter: DrafterChoice
  rule: Rule
  sampling: Sampling
  exact_bits: bool = False

  def build(self) -> decoder.Decoder:
    """Reads the models; see `decoder.build`."""
    return decoder.build(**vars(self), waiting=progress.waiting)


def choices(args: argparse.Namespace, *, may_be_auto: bool = False) -> Choices:
  """Makes the choices; ValueError if flags contradict each other, or --gamma is
  'auto' where nothing is decoded with what was chosen."""
  settings(args)  # It says what does not go together.
  revision = '' if args.revision is None else f'@{args.revision}'
  rule = chosen('verification', RULES, args.verification, vars(args))
  sampling = named(Sampling, args)
  judge = rule.judge(sampling)
  # Not all commands have the flag.
  exact_bits = getattr(args, 'exact_bits', False)
  is_auto = may_be_auto and judge.is_lossless and not exact_bits
  found = Choices(
    model=named(
      Model, args, checkpoint=f'{args.model}{revision}', sizes=args.config
    ),
    drafter=_drafter(args, is_auto=is_auto),
    rule=rule,
    sampling=sampling,
    exact_bits=exact_bits,
  )
  length = found.drafter.length
  if isinstance(length, Auto) and not may_be_auto:
    raise ValueError('--gamma auto is for commands that decode, such as bench')
  # Before anything is loaded.
  judge.verify_fn(length if isinstance(length, Tree) else None)
  judge.sampling.check_is_used()
  return found


def named(kind: Callable[..., Made], args: argparse.Namespace, **own) -> Made:
  """Makes a dataclass of the flags with the names of its fields."""
  # Of `Sampling`: args.temperature becomes its field `temperature`.
  names = [name for name in field_names(kind) if name not in own]
  return kind(**{n: v for n, v in vars(args).items() if n in names}, **own)


def _drafter(args: argparse.Namespace, *, is_auto: bool) -> DrafterChoice:
  checkpoint, given = args.draft_model, vars(args)
  if not checkpoint and not args.draft_config:
    checkpoint, given = usual.shipped(args.model, given, args.drafter)
  name = args.drafter or usual.drafter(checkpoint, args.draft_config)
  model = None
  if checkpoint:
    model = Model(
      checkpoint=checkpoint,
      sizes=args.draft_config,
      vocabulary=args.vocabulary,
      dtype=args.draft_dtype or args.dtype,
    )
  for flag in ('draft_dtype', 'draft_config'):
    if getattr(args, flag) and model is None:
      raise ValueError(f'--{flag} is for --draft_model, which is not given')
  # Of args, `model` is the target.
  given = given | {'model': model}
  made = chosen('drafter', DRAFTERS, name, given)
  length = made.length
  if is_auto or not isinstance(length, Auto) or length.usual is None:
    return made
  return dataclasses.replace(made, gamma=length.usual)  # type: ignore[type-var]


def settings(args: argparse.Namespace) -> running.DecodeSettings:
  """Makes the settings of a decode."""
  # The decoder's sampling has the same flags: settings say nothing of them.
  own = dict.fromkeys(field_names(Sampling))
  # Of commands without the flag, no string ends a text.
  own |= {'stop': getattr(args, 'stop', ())}
  return named(running.DecodeSettings, args, call=progress.interruptible, **own)


class Prepared(NamedTuple):
  """A decoder, the batches that it decodes, how, and the labels of each prompt,
  which are for the readers of its results."""

  decoder: decoder.Decoder
  batches: list[prompts.Batch]
  settings: running.DecodeSettings
  labels: list[dict[str, Any]]


def prepared(
  args: argparse.Namespace,
  chosen: Choices,
  *,
  trace: str | None = None,
  num_samples: int | None = None,
) -> Prepared:
  """Reads the models and the prompts, and packs these in batches.

  With `num_samples`, rows per prompt, a batch has no more rows than there are,
  and lines of the prompts may have settings of their own; without, it has as
  many as were asked for, and lines may not. `trace` is written like --json.
  Raises ValueError as `decoder.build` and `packing.pack`, if there are fewer
  devices, or an output cannot be written.
  """
  outputs.check({'--json': args.json, '--trace': trace}, files_read(args))
  # Whatever can be refused cheaply is refused before a model is read.
  prompt_lines, how = lines(args), settings(args)
  texts = [line.text for line in prompt_lines]
  if num_samples is None:
    texts = texts_alone(prompt_lines)
  else:
    own = [
      _fields(line, how, chosen.sampling, num_samples) for line in prompt_lines
    ]
    how = dataclasses.replace(how, texts=own if any(own) else ())
  compilation_cache.enable()
  if getattr(args, 'forget', False):
    gamma_memory.forget()
  mesh.check_devices(args.num_devices)
  made = chosen.build()
  if num_samples is not None:
    # No device gets only rows that fill the batch.
    how = how.for_rows(len(texts) * num_samples)
  return Prepared(
    decoder=made,
    batches=packing.pack(made, texts, how, num_samples or 1),
    settings=how,
    labels=[_labels(line) for line in prompt_lines],
  )


def files_read(args: argparse.Namespace) -> dict[str, str | None]:
  """Returns the files that a decode reads besides models, by flag."""
  names = ('prompts', 'ngram_text', 'suffix_text')
  return {f'--{name}': getattr(args, name) for name in names}


def lines(args: argparse.Namespace) -> list[prompts.Line]:
  """Reads prompts, with the variables of a chat template; raises as
  `prompts.read`, and ValueError for variables without --chat."""
  read = prompts.read(getattr(args, 'prompt', None), args.prompts)
  template_kwargs = args.chat_template_kwargs
  if template_kwargs is None:
    return read
  if not args.chat:
    raise ValueError('--chat_template_kwargs is for --chat, which is not given')
  return [
    line._replace(text=prompts.with_template_kwargs(line.text, template_kwargs))
    for line in read
  ]


def texts_alone(lines: Sequence[prompts.Line]) -> list[prompts.Text]:
  """Returns the texts of prompts; ValueError for a line that has settings of
  its own, which would be ignored."""
  for line in lines:
    if given := [name for name in running.PER_TEXT if name in line.fields]:
      raise ValueError(
        f'{line.place}: {given[0]} of one line is for generate alone'
      )
  return [line.text for line in lines]


def _fields(
  line: prompts.Line,
  how: running.DecodeSettings,
  sampling: Sampling,
  num_samples: int,
) -> dict[str, Any]:
  """Checks the settings that a line has of its own; ValueError with its place
  for others, for values out of range, and for many samples of a greedy one."""
  known = running.PER_TEXT
  if unknown := [x for x in line.fields if x not in (*known, *_LABELS)]:
    raise ValueError(
      f'{line.place}: no setting is called {unknown[0]!r}; a line may have '
      f'{", ".join((*known, *_LABELS))}{did_you_mean(unknown[0], known)}'
    )
  try:
    text = json.dumps(_labels(line), ensure_ascii=False, allow_nan=False)
  except ValueError as error:
    raise ValueError(f'{line.place}: {error}') from error
  text_lines.check_encodable(text, line.place)
  own = {x: line.fields[x] for x in known if line.fields.get(x) is not None}
  try:
    made = dataclasses.replace(how, texts=[own]).of_text(0).sampling(sampling)
  except (TypeError, ValueError) as error:
    raise ValueError(f'{line.place}: {error}') from error
  if num_samples > 1 and made.is_greedy:
    raise ValueError(
      f'{line.place}: --num_return_sequences {num_samples} at temperature 0 '
      'gives one text so many times'
    )
  return own


def _labels(line: prompts.Line) -> dict[str, Any]:
  """Returns what a line has for the readers of its results."""
  return {name: line.fields[name] for name in _LABELS if name in line.fields}
