"""Which models: their names, and what their own folders do not say of them."""

import argparse
from typing import Any

import jax.numpy as jnp

from specdec_jax.assembly import random_models
from specdec_jax.checkpoints import loading
from specdec_jax.checkpoints.loading import LoadedModel
from specdec_jax.launch import progress

DEFAULT_MODEL = 'smollm2-135m'
_HUB = 'hf:'


def add_arguments(group: Any) -> None:
  """The options of target and draft model, to a group."""
  group.add_argument(
    '--model',
    default=DEFAULT_MODEL,
    help=f'the target: {DEFAULT_MODEL}, a model of this package such as '
    'ende-mini, a .gguf file, a folder of Hugging Face (Llama, Qwen2, Mistral, '
    'T5), T5X or specdec convert, hf:organisation/name, or random:t5_1_1_small '
    'for random weights of named sizes',
  )
  group.add_argument(
    '--config',
    metavar='SIZES',
    help='sizes of a T5X checkpoint without a model.json: a name such as '
    't5_1_1_small, or the path of a model.json',
  )
  group.add_argument(
    '--vocabulary',
    metavar='PATH',
    help='a SentencePiece model or a folder with a vocabulary, for target and '
    'draft model (default: what lies beside each)',
  )
  group.add_argument(
    '--revision',
    help='branch, tag or commit of an hf: model; also written '
    'hf:organisation/name@REVISION',
  )
  group.add_argument('--draft_model', help='the draft model, named likewise')
  group.add_argument(
    '--draft_config', metavar='SIZES', help='--config of the draft model'
  )


def check(args: argparse.Namespace) -> None:
  """Raises ValueError unless the options fit together.

  Puts `args.revision` into `args.model`.
  """
  if args.draft_config and not args.draft_model:
    raise ValueError('--draft_config is for --draft_model, which is not given')
  if args.revision is not None:
    if not args.model.startswith(_HUB):
      raise ValueError(
        f'--revision is for hf:organisation/name, and --model is {args.model}'
      )
    if '@' in args.model or not args.revision:
      raise ValueError(
        f'--model {args.model} with --revision {args.revision!r} does not name '
        'one revision'
      )
    args.model, args.revision = f'{args.model}@{args.revision}', None


def load_both(
  args: argparse.Namespace,
) -> tuple[LoadedModel, LoadedModel | None]:
  """The target, and the draft model if there is one.

  Raises:
    ValueError: if one cannot be had.
    ImportError: if a package that reads it is not installed.
  """
  target_name = (args.model, args.config, args.dtype)
  draft_name = (args.draft_model, args.draft_config, args.draft_dtype)

  def load_one(name: str, config: str | None, dtype: str) -> LoadedModel:
    with progress.waiting(f'loading {name}'):
      return load(
        name, jnp.dtype(dtype), config=config, vocabulary=args.vocabulary
      )

  target = load_one(*target_name)
  if args.drafter != 'model':
    return target, None
  return target, target if draft_name == target_name else load_one(*draft_name)


def load(
  name: str,
  dtype: jnp.dtype,
  *,
  config: str | None = None,
  vocabulary: str | None = None,
) -> LoadedModel:
  """A model by name, see `checkpoints.loading.load`; `random:` and the name of
  sizes is one with random weights."""
  if not name.startswith(random_models.PREFIX):
    return loading.load(name, dtype=dtype, config=config, vocabulary=vocabulary)
  if config is not None or vocabulary is not None:
    raise ValueError(
      f'{name} has sizes of its own and bytes for tokens: leave out --config '
      'and --vocabulary'
    )
  return random_models.load(name, dtype=dtype)
