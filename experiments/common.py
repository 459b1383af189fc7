"""What the experiments share: options, models, batches, and the end of runs."""

import argparse
import dataclasses
import functools
import sys
from collections.abc import (
  Callable,
  Collection,
  Hashable,
  Iterator,
  Mapping,
  Sequence,
)
from pathlib import Path
from subprocess import CalledProcessError
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from specdec_jax.assembly import decoder as decoder_lib
from specdec_jax.assembly import models
from specdec_jax.assembly.decoder import Decoder
from specdec_jax.assembly.drafters import DrafterChoice
from specdec_jax.assembly.drafters.choice import Target
from specdec_jax.assembly.models import Model
from specdec_jax.assembly.rules import Rule, SpeculativeSampling
from specdec_jax.assembly.text_settings import TextSettings
from specdec_jax.base import Array, Params, Prompt
from specdec_jax.checkpoints import loading
from specdec_jax.checkpoints.loading import LoadedModel
from specdec_jax.decoding.method import Method
from specdec_jax.infer import examples
from specdec_jax.infer.examples import Layout, Row
from specdec_jax.launch import compilation_cache
from specdec_jax.launch.numbers import positive_int
from specdec_jax.measure import loops, stopwatch
from specdec_jax.models import presets

Name = TypeVar('Name', bound=Hashable)
Item = TypeVar('Item')


def finish(name: str, run: Callable[[], None]) -> int:
  """Runs an experiment; its exit status, 2 with a sentence for wrong input."""
  try:
    compilation_cache.enable()
    run()
  except (ValueError, OSError, ImportError, CalledProcessError) as error:
    print(f'{name}: error: {error}', file=sys.stderr)
    return 2
  return 0


def add_counts(parser: argparse.ArgumentParser, **defaults: int) -> None:
  """Options that are whole numbers from 1 on, with their defaults."""
  for name, default in defaults.items():
    parser.add_argument(f'--{name}', type=positive_int, default=default)


def chosen(settings: type, args: argparse.Namespace) -> Any:
  """A dataclass of what was given for its fields."""
  names = [field.name for field in dataclasses.fields(settings)]
  return settings(**{name: getattr(args, name) for name in names})


def add_dtypes(parser: argparse.ArgumentParser) -> None:
  """`--dtype` of what speculates, and `--plain_dtypes` of what it is compared
  with: the fastest of them."""
  parser.add_argument(
    '--dtype',
    choices=presets.DTYPES,
    help='where the target verifies (default: in which five rows are '
    'multiplied most quickly here)',
  )
  parser.add_argument(
    '--plain_dtypes',
    metavar='DTYPES',
    type=listed(dtype),
    default=list(presets.DTYPES),
    help='of plain decoding, to choose the fastest from, with commas between',
  )


def listed(kind: Callable[[str], Any] = str) -> Callable[[str], list]:
  """Makes an argparse type: values with commas between, each once."""
  return lambda text: list(
    dict.fromkeys(kind(part.strip()) for part in text.split(','))
  )


# An argparse type: whole numbers from 1 on.
numbers = listed(positive_int)


def dtype(text: str) -> str:
  """An argparse type: one of `presets.DTYPES`."""
  if text not in presets.DTYPES:
    raise argparse.ArgumentTypeError(
      f'{text!r} is none of {", ".join(presets.DTYPES)}'
    )
  return text


def verifying_dtype(args: argparse.Namespace) -> str:
  """What `--dtype` said, or is by default."""
  return args.dtype or quickest_dtype(presets.DTYPES)


def quickest_dtype(
  dtypes: Sequence[str], num_rows: int = 5, repeats: int = 5
) -> str:
  """The dtype in which this device is fastest at multiplying a few rows by
  weights, as a target does that scores `num_rows` positions."""
  if len(dtypes) == 1:
    return dtypes[0]

  def products(rows: jax.Array, weights: Sequence[jax.Array]) -> jax.Array:
    for weight in weights:
      rows = rows @ weight
    return rows

  programs = {}
  for dtype in dtypes:
    weights = [jnp.eye(1024, dtype=dtype) for _ in range(8)]
    args = jnp.ones((num_rows, 1024), dtype), weights
    compiled = jax.jit(products).lower(*args).compile()
    programs[dtype] = functools.partial(compiled, *args)
  seconds, _ = stopwatch.alternate(programs, repeats)
  return min(dtypes, key=lambda dtype: float(np.median(seconds[dtype])))


def add_tables(
  parser: argparse.ArgumentParser, tables: Collection[str]
) -> None:
  """`--tables`, names of `tables` with commas between; all by default."""

  def names(text: str) -> list[str]:
    chosen = text.split(',')
    for name in chosen:
      if name not in tables:
        raise argparse.ArgumentTypeError(
          f'{name!r} is no table; there are {", ".join(tables)}'
        )
    return chosen

  parser.add_argument(
    '--tables',
    type=names,
    default=list(tables),
    help=f'of {", ".join(tables)} (default: all)',
  )


def target_info(model: Any, temperature: float) -> Target:
  """Makes what drafters know of a target.

  Args:
    model: with the `config` and `vocabulary` of a target, and its `name`.
    temperature: 0 is greedy.
  """
  return Target(
    name=model.name,
    config=model.config,
    vocabulary=model.vocabulary,
    sampling=TextSettings(temperature=temperature),
  )


def load(model: Model) -> LoadedModel:
  """A model with its weights on the default device, for array-level functions;
  ValueError if it cannot be had."""
  if not model.is_random:
    return loading.load(
      model.checkpoint,
      dtype=jnp.dtype(model.dtype),
      config=model.sizes,
      vocabulary=model.vocabulary,
    )
  config = models.read_config(model)
  params = models.read_params(model, config)
  return LoadedModel(
    name=model.checkpoint,
    config=config,
    params=params,
    vocabulary=models.read_vocabulary(model, config),
    description=f'{model.checkpoint}: RANDOM parameters in {model.dtype}',
  )


def decoder(
  model: Model,
  drafter: DrafterChoice,
  params: Params,
  *,
  rule: Rule = SpeculativeSampling(),
  temperature: float = 0.0,
) -> Decoder:
  """`assembly.decoder.build` with weights that are loaded already: those of
  the target, and the drafter's own."""
  made = decoder_lib.outline(
    model,
    drafter=drafter,
    rule=rule,
    sampling=TextSettings(temperature=temperature),
  )
  own = made.parts.drafting.join(params.target, params.drafter)
  return dataclasses.replace(made, params=Params(params.target, own))


def spread(rows: Sequence[Item], count: int) -> list[Item]:
  """`count` examples, evenly spread over the split."""
  count = min(count, len(rows))
  indices = np.linspace(0, len(rows) - 1, count).round().astype(int)
  return [rows[i] for i in indices]


def pack(layout: Layout, rows: Sequence[Row], batch_size: int) -> Prompt:
  """One batch; rows that are missing are empty."""
  filled = [*rows, *[None] * (batch_size - len(rows))]
  return jax.tree.map(jnp.asarray, examples.packer(layout)(filled))


def batches(
  layout: Layout, rows: Sequence[Row], batch_size: int
) -> Iterator[tuple[Prompt, Sequence[Row]]]:
  """Batches in the order of the examples, each with the rows that are in it."""
  for start in range(0, len(rows), batch_size):
    part = rows[start : start + batch_size]
    yield pack(layout, part, batch_size), part


def short(name: str) -> str:
  """A model without the folders of the machine that it lies on."""
  parts = Path(name).parts
  return '/'.join(parts[-2:] if parts[-1] == 'model' else parts[-1:])


def speculative_loops(
  params: Params,
  rng_key: Array,
  prompts: Sequence[Prompt],
  *,
  methods: Mapping[Name, Method],
  max_len: int,
) -> dict[Name, loops.CompiledLoop]:
  """Compiles loops with one kind of drafter, which share the prefill and the
  buffers of the longest draft; unless the target keeps as many features as are
  drafted, so that its state is not the same for all."""
  args = params, rng_key, prompts
  make = functools.partial(loops.speculative_loop, *args, max_len=max_len)
  # A cache has room for `max_len + gamma + 1` positions: that of the longest
  # draft fits the others.
  longest = max(methods, key=lambda name: methods[name].drafter.gamma)
  is_shared = not methods[longest].drafter.reads_target_cache
  made = {longest: make(method=methods[longest])}
  rest = {
    name: functools.partial(loops.like, made[longest], method)
    if is_shared
    else functools.partial(make, method=method)
    for name, method in methods.items()
    if name != longest
  }
  return made | stopwatch.together(rest)
