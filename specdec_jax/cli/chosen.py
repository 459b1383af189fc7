"""From flags to a decoder and the batches that it decodes."""

import argparse
from typing import Any

from specdec_jax.assembly import decoder, rules, running
from specdec_jax.assembly.decoder import Decoder
from specdec_jax.assembly.drafters import DRAFTERS, DrafterChoice
from specdec_jax.assembly.drafters.choice import has_model, has_schedule
from specdec_jax.assembly.lengths import Auto
from specdec_jax.assembly.models import Model
from specdec_jax.assembly.option_fields import chosen
from specdec_jax.assembly.rules import RULES
from specdec_jax.assembly.sampling import Sampling
from specdec_jax.base import Tree
from specdec_jax.cli import options, outputs
from specdec_jax.drafters import schedules
from specdec_jax.launch import compilation_cache, progress
from specdec_jax.sharding import mesh
from specdec_jax.text import prompts
from specdec_jax.text.prompts import Batch

_HUB = 'hf:'
# Drafters whose gamma is that of `--gamma` if nothing is said; the others know
# their own.
_GAMMA_OF_ALL = ('prompt_lookup', 'ngram', 'uniform', 'model')


def choices_of(
  args: argparse.Namespace, *, may_be_auto: bool = False
) -> dict[str, Any]:
  """What flags stand for, as `decoder.build` takes it; nothing is read yet. A
  ValueError if they contradict each other, or a gamma is not to be measured."""
  if args.system is not None and not args.chat:
    raise ValueError('--system is for --chat, which is not given')
  if args.batch_size % args.num_devices:
    raise ValueError(
      f'a batch of {args.batch_size} rows does not divide over '
      f'{args.num_devices} devices'
    )
  names = ('temperature', 'top_k', 'top_p', 'min_p')
  sampling = Sampling(**{name: getattr(args, name) for name in names})
  model, drafter = _model(args), _drafter(args)
  rule = chosen('verification', RULES, args.verification, vars(args))
  length = drafter.length
  if isinstance(length, Auto) and not may_be_auto:
    raise ValueError(
      '--gamma auto is measured by bench and infer, and in Python: give a '
      'number'
    )
  # Before anything is loaded.
  rules.fitting(rule, length if isinstance(length, Tree) else None)
  rule.seen(sampling).check_is_used()
  return {
    'model': model,
    'drafter': drafter,
    'rule': rule,
    'sampling': sampling,
  }


def _model(args: argparse.Namespace) -> Model:
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
  """`--drafter`, or what is meant without it."""
  return args.drafter or ('model' if args.draft_model else 'prompt_lookup')


def lenience(args: argparse.Namespace) -> float:
  """What `--lenience` is, or 1, with which nothing is relaxed."""
  return 1.0 if args.lenience is None else args.lenience


def _drafter(args: argparse.Namespace) -> DrafterChoice:
  name = drafter_name(args)
  fixed: dict[str, Any] = {}
  if has_model(DRAFTERS[name]):
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
    if getattr(args, flag) and not fixed:
      raise ValueError(f'--{flag} is for --drafter model, not {name}')
  fixed |= _schedule(args, name)
  if name in _GAMMA_OF_ALL and args.gamma is None and args.tree is None:
    fixed['gamma'] = options.GAMMA
  return chosen('drafter', DRAFTERS, name, vars(args), **fixed)


def _schedule(args: argparse.Namespace, drafter: str) -> dict[str, Any]:
  """The fields of a draft model whose gamma varies."""
  name = args.adaptive
  if name is None:
    for flag in ('min_prob', 'draft_cost'):
      if getattr(args, flag) is not None:
        raise ValueError(f'--{flag} is for --adaptive, which is not given')
    return {}
  if not has_schedule(DRAFTERS[drafter]):
    kinds = [x for x in DRAFTERS if has_schedule(DRAFTERS[x])]
    raise ValueError(
      f'--adaptive {name} is for --drafter {" or ".join(kinds)}, not {drafter}'
    )
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


def settings_of(args: argparse.Namespace) -> running.Settings:
  """How a decode goes."""
  names = ('max_new_tokens', 'seed', 'num_devices')
  found = {name: getattr(args, name) for name in names}
  return running.Settings(**found, stop=getattr(args, 'stop', None) or ())


def prepared(
  args: argparse.Namespace,
  choices: dict[str, Any],
  *,
  trace: str | None = None,
  num_samples: int | None = None,
) -> tuple[Decoder, list[Batch]]:
  """The decoder of `choices_of`, its models read, and the prompts in batches.

  With `num_samples`, rows per prompt, a batch has no more rows than there are;
  without, it has as many as were asked for. `trace` is written like --json.

  Raises:
    ValueError: as `decoder.build` and `running.pack`, if there are fewer
      devices, or an output cannot be written.
  """
  outputs.check(
    {'--json': args.json, '--trace': trace},
    {'--prompts': args.prompts, '--ngram_text': args.ngram_text},
  )
  texts = prompts.read(args.prompt, args.prompts)
  compilation_cache.enable()
  mesh.check_devices(args.num_devices)
  made = decoder.build(**choices, waiting=progress.waiting)
  batch_size = args.batch_size
  if num_samples is not None:
    # No devices full of rows that are nobody's.
    num_rows = len(texts) * num_samples
    batch_size = min(batch_size, num_rows + -num_rows % args.num_devices)
  return made, running.pack(
    made,
    texts,
    max_new_tokens=args.max_new_tokens,
    batch_size=batch_size,
    is_chat=args.chat,
    system=args.system,
    num_samples=num_samples or 1,
  )
