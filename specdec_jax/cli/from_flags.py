"""From flags to a decoder and the batches that it decodes."""

import argparse
import dataclasses
import json
from collections.abc import Sequence
from typing import Any, NamedTuple

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
from specdec_jax.assembly.option_fields import chosen
from specdec_jax.assembly.rules import RULES, Rule
from specdec_jax.assembly.text_settings import NAMES, TextSettings
from specdec_jax.base import Tree
from specdec_jax.cli import outputs
from specdec_jax.files import text_lines
from specdec_jax.launch import compilation_cache, progress
from specdec_jax.launch.spelling import did_you_mean
from specdec_jax.sharding import mesh
from specdec_jax.text import prompts

# Keys that a line of --prompts may have, copied to its results.
_LABELS = ('id', 'task')


@dataclasses.dataclass(frozen=True, kw_only=True)
class Choices:
  """What the flags select; no model is read yet."""

  model: Model
  drafter: DrafterChoice
  rule: Rule
  sampling: TextSettings
  exact_bits: bool = False

  def build(self) -> decoder.Decoder:
    """Reads the models; see `decoder.build`."""
    return decoder.build(**vars(self), waiting=progress.waiting)


def choices(args: argparse.Namespace, *, may_be_auto: bool = False) -> Choices:
  """Returns what the flags select.

  ValueError if flags contradict each other, or --gamma is 'auto' and
  `may_be_auto` is not set: for commands that need a fixed gamma.
  """
  settings(args)  # Raises for settings that exclude each other.
  revision = '' if args.revision is None else f'@{args.revision}'
  rule = chosen('verification', RULES, args.verification, vars(args))
  # Each of these flags is a field, see `options.add_sampling`.
  sampling = TextSettings(**{name: getattr(args, name) for name in NAMES})
  judge = rule.judge(sampling)
  # Some commands lack the flag.
  exact_bits = getattr(args, 'exact_bits', False)
  is_auto = may_be_auto and judge.is_lossless and not exact_bits
  result = Choices(
    model=Model(
      checkpoint=f'{args.model}{revision}',
      sizes=args.config,
      vocabulary=args.vocabulary,
      dtype=args.dtype,
      weights=args.weights,
      cache_dtype=args.cache_dtype,
    ),
    drafter=_drafter(args, is_auto=is_auto),
    rule=rule,
    sampling=sampling,
    exact_bits=exact_bits,
  )
  length = result.drafter.length
  if isinstance(length, Auto) and not may_be_auto:
    raise ValueError('--gamma auto is for commands that decode, such as bench')
  # Refuse impossible combinations before any model is loaded.
  judge.verify_fn(length if isinstance(length, Tree) else None)
  judge.sampling.check_is_used()
  return result


def _drafter(args: argparse.Namespace, *, is_auto: bool) -> DrafterChoice:
  checkpoint, flags = args.draft_model, vars(args)
  if not checkpoint and not args.draft_config:
    checkpoint, flags = usual.shipped(args.model, flags, args.drafter)
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
  # args.model is the target; the drafter's field `model` is the draft model.
  flags = flags | {'model': model}
  drafter = chosen('drafter', DRAFTERS, name, flags)
  length = drafter.length
  if is_auto or not isinstance(length, Auto) or length.usual is None:
    return drafter
  return dataclasses.replace(drafter, gamma=length.usual)  # type: ignore[type-var]


def settings(args: argparse.Namespace) -> running.DecodeSettings:
  """Returns the settings of a decode."""
  # Flags of sampling configure the decoder, and are not repeated here.
  return running.DecodeSettings(
    max_new_tokens=args.max_new_tokens,
    seed=args.seed,
    chat=args.chat,
    system=args.system,
    call=progress.interruptible,
    # `chat` decodes one row, and only `generate` shows the likeliest tokens.
    batch_size=getattr(args, 'batch_size', 1),
    num_devices=getattr(args, 'num_devices', 1),
    top_logprobs=getattr(args, 'top_logprobs', None),
    # Commands without --stop have no stop strings.
    stop=getattr(args, 'stop', ()),
  )


class Prepared(NamedTuple):
  """A decoder, the batches to decode, the settings of that, and the labels of
  each prompt, which are copied to its results."""

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

  With `num_samples`, rows per prompt, the batch size is at most the number of
  rows, and lines of --prompts may override settings. Without it, batches have
  --batch_size rows, and a line with settings is refused. `trace` is the path
  of a trace, checked like --json. ValueError as from `decoder.build` and
  `packing.pack`, for too few devices, or if an output cannot be written.
  """
  # Check outputs and prompts first: reading the models takes longest.
  outputs.check({'--json': args.json, '--trace': trace}, files_read(args))
  prompt_lines = lines(args)
  how = settings(args)
  texts = [line.text for line in prompt_lines]
  if num_samples is None:
    texts = texts_alone(prompt_lines)
  else:
    per_text = [
      _fields(line, how, chosen.sampling, num_samples) for line in prompt_lines
    ]
    how = dataclasses.replace(how, texts=per_text if any(per_text) else ())
  # Read the models.
  compilation_cache.enable()
  if getattr(args, 'forget', False):
    gamma_memory.forget()
  mesh.check_devices(args.num_devices)
  built = chosen.build()
  if num_samples is not None:
    # Each device gets at least one prompt.
    how = how.for_rows(len(texts) * num_samples)
  return Prepared(
    decoder=built,
    batches=packing.pack(built, texts, how, num_samples or 1),
    settings=how,
    labels=[_labels(line) for line in prompt_lines],
  )


def files_read(args: argparse.Namespace) -> dict[str, str | None]:
  """Returns the input files of a decode other than models, by flag."""
  names = ('prompts', 'ngram_text', 'suffix_text')
  # A drafter of an extra that is not installed adds no flags.
  return {f'--{name}': getattr(args, name, None) for name in names}


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
  """Returns the texts of prompts; ValueError for a line with settings, which
  only `generate` reads."""
  for line in lines:
    if names := [name for name in running.PER_TEXT if name in line.fields]:
      raise ValueError(
        f'{line.place}: only generate reads {names[0]} of a line'
      )
  return [line.text for line in lines]


def _fields(
  line: prompts.Line,
  how: running.DecodeSettings,
  sampling: TextSettings,
  num_samples: int,
) -> dict[str, Any]:
  """Returns the settings of a line of --prompts, checked.

  ValueError, with the line's place, for an unknown setting, a value out of
  range, or several samples of a greedy text.
  """
  # Names of settings and labels.
  setting_names = running.PER_TEXT
  allowed = (*setting_names, *_LABELS)
  unknown = [name for name in line.fields if name not in allowed]
  if unknown:
    hint = did_you_mean(unknown[0], setting_names)
    raise ValueError(
      f'{line.place}: no setting is called {unknown[0]!r}; a line may have '
      f'{", ".join(allowed)}{hint}'
    )
  # Labels are written as JSON.
  try:
    text = json.dumps(_labels(line), ensure_ascii=False, allow_nan=False)
  except ValueError as error:
    raise ValueError(f'{line.place}: {error}') from error
  text_lines.check_encodable(text, line.place)
  # Values of settings; null is a setting that is not given.
  values = {name: line.fields.get(name) for name in setting_names}
  fields = {name: x for name, x in values.items() if x is not None}
  try:
    text_settings = dataclasses.replace(how, texts=[fields]).of_text(0)
    text_sampling = text_settings.sampling(sampling)
  except (TypeError, ValueError) as error:
    raise ValueError(f'{line.place}: {error}') from error
  if num_samples > 1 and text_sampling.is_greedy:
    raise ValueError(
      f'{line.place}: --num_return_sequences {num_samples} at temperature 0 '
      'returns the same text so many times'
    )
  return fields


def _labels(line: prompts.Line) -> dict[str, Any]:
  """Returns the labels of a line, which are copied to its results."""
  return {name: line.fields[name] for name in _LABELS if name in line.fields}
