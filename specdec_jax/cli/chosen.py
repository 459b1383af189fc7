"""From flags to the choices that `assembly` makes a decoder of."""

import argparse
import dataclasses
from collections.abc import Sequence
from typing import Any

from specdec_jax.assembly import decoder, drafting, running
from specdec_jax.assembly.choices import Sampling, chosen, named_by_flags
from specdec_jax.assembly.decoder import Decoder
from specdec_jax.assembly.drafting import DRAFTERS, DrafterChoice
from specdec_jax.assembly.models import Model
from specdec_jax.assembly.rules import RULES, Rule
from specdec_jax.cli import options
from specdec_jax.drafters import schedules
from specdec_jax.launch import compilation_cache, progress
from specdec_jax.sharding import mesh
from specdec_jax.text.prompts import Batch

_HUB = 'hf:'
# Drafters whose gamma is that of `--gamma` if nothing is said; the others know
# their own.
_GAMMA_OF_ALL = ('prompt_lookup', 'ngram', 'uniform', 'model')
_flags = named_by_flags('--{}')


@dataclasses.dataclass(frozen=True, kw_only=True)
class Choices:
  """What flags have chosen, for `assembly.decoder`."""

  model: Model
  drafter: DrafterChoice
  rule: Rule
  sampling: Sampling


@_flags
def choices_of(
  args: argparse.Namespace, *, may_be_auto: bool = False
) -> Choices:
  """The choices that flags stand for; nothing is read yet. Only some commands
  measure a gamma.

  Raises:
    ValueError: if flags contradict each other.
  """
  if args.system is not None and not args.chat:
    raise ValueError('--system is for --chat, which is not given')
  if args.batch_size % args.num_devices:
    raise ValueError(
      f'a batch of {args.batch_size} rows does not divide over '
      f'{args.num_devices} devices'
    )
  sampling = Sampling(
    temperature=args.temperature,
    top_k=args.top_k,
    top_p=args.top_p,
    min_p=args.min_p,
  )
  found = Choices(
    model=_model(args),
    drafter=_drafter(args),
    rule=chosen('verification', RULES, args.verification, vars(args)),
    sampling=sampling,
  )
  if drafting.is_auto(found.drafter) and not may_be_auto:
    raise ValueError(
      '--gamma auto is measured by bench and infer, and in Python: give a '
      'number'
    )
  # Before anything is loaded.
  found.rule.seen(sampling).check_is_used()
  return found


def _model(args: argparse.Namespace) -> Model:
  """The target; a revision becomes part of its name."""
  name = args.model
  if args.revision is not None:
    if not name.startswith(_HUB):
      raise ValueError(
        f'--revision is for hf:organisation/name, and --model is {name}'
      )
    if '@' in name or not args.revision:
      raise ValueError(
        f'--model {name} with --revision {args.revision!r} does not name one '
        'revision'
      )
    name = f'{name}@{args.revision}'
  return Model(
    checkpoint=name,
    sizes=args.config,
    vocabulary=args.vocabulary,
    dtype=args.dtype,
  )


def drafter_name(args: argparse.Namespace) -> str:
  """What `--drafter` is, or stands for if it is not given."""
  return args.drafter or ('model' if args.draft_model else 'prompt_lookup')


def lenience(args: argparse.Namespace) -> float:
  """What `--lenience` is, or 1, with which nothing is relaxed."""
  return 1.0 if args.lenience is None else args.lenience


def _drafter(args: argparse.Namespace) -> DrafterChoice:
  """The drafter, with its model if it has one."""
  name = drafter_name(args)
  fixed: dict[str, Any] = {}
  if drafting.has_model(DRAFTERS[name]):
    if not args.draft_model:
      raise ValueError(f'--drafter {name} needs --draft_model')
    fixed['model'] = Model(
      checkpoint=args.draft_model,
      sizes=args.draft_config,
      vocabulary=args.vocabulary,
      dtype=args.draft_dtype or args.dtype,
    )
  elif args.draft_config and not args.draft_model:
    raise ValueError('--draft_config is for --draft_model, which is not given')
  for flag in ('draft_model', 'draft_dtype', 'draft_config'):
    if getattr(args, flag) and 'model' not in fixed:
      raise ValueError(f'--{flag} is for --drafter model, not {name}')
  fixed |= _schedule(args, name)
  if name in _GAMMA_OF_ALL and args.gamma is None:
    fixed['gamma'] = options.GAMMA
  return chosen('drafter', DRAFTERS, name, vars(args), **fixed)


def _schedule(args: argparse.Namespace, drafter: str) -> dict[str, Any]:
  """The fields of a draft model whose gamma varies.

  Raises:
    ValueError: unless the flags of a gamma that varies fit.
  """
  name = args.adaptive
  if name is None:
    for flag in ('min_prob', 'draft_cost'):
      if getattr(args, flag) is not None:
        raise ValueError(f'--{flag} is for --adaptive, which is not given')
    return {}
  if drafter != 'model':
    raise ValueError(f'--adaptive {name} is for --drafter model, not {drafter}')
  if name == 'estimate' and args.draft_cost is None:
    raise ValueError(
      '--adaptive estimate needs --draft_cost, which `specdec calibrate` '
      'measures as c'
    )
  if name != 'estimate' and args.draft_cost is not None:
    raise ValueError(f'--draft_cost is for --adaptive estimate, not {name}')
  min_prob = args.min_prob
  if min_prob is None:
    min_prob = options.MIN_PROB if name == 'threshold' else 0.0
  limits = {
    'threshold': schedules.fixed,
    'heuristic': schedules.heuristic,
    'estimate': lambda: schedules.running_alpha(c=args.draft_cost),
  }
  return {'schedule': limits[name](), 'min_prob': min_prob}


@_flags
def decoder_of(args: argparse.Namespace, choices: Choices) -> Decoder:
  """The decoder that was chosen, its models read.

  Raises:
    ValueError: as `decoder.build`, or if there are fewer devices.
  """
  compilation_cache.enable()
  mesh.check_devices(args.num_devices)
  return decoder.build(
    choices.model,
    drafter=choices.drafter,
    rule=choices.rule,
    sampling=choices.sampling,
    waiting=progress.waiting,
  )


@_flags
def batches_of(
  args: argparse.Namespace,
  made: Decoder,
  texts: Sequence[str],
  *,
  batch_size: int | None = None,
  num_samples: int = 1,
) -> list[Batch]:
  """Texts as batches; `running.pack` with the arguments of flags."""
  return running.pack(
    made,
    texts,
    max_new_tokens=args.max_new_tokens,
    batch_size=batch_size or args.batch_size,
    is_chat=args.chat,
    system=args.system,
    num_samples=num_samples,
  )
