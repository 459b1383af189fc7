"""The target's own weights in few bits, and perhaps of fewer layers."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np

from specdec_jax.assembly import lengths
from specdec_jax.assembly.drafters import one_by_one
from specdec_jax.assembly.drafters.choice import Drafting, Target
from specdec_jax.assembly.option_fields import option
from specdec_jax.base import Arrays
from specdec_jax.drafters.autoregressive import as_chain
from specdec_jax.launch.numbers import positive_int
from specdec_jax.models import families, quantized
from specdec_jax.models.families import Config
from specdec_jax.models.quantized import Bits

# How many layers, a slice of them, or their numbers.
Layers = int | str | Sequence[int]


def _layers(text: str) -> Layers:
  return int(text) if text.isdecimal() else text


@dataclasses.dataclass(frozen=True, kw_only=True)
class Quantized(one_by_one.OneByOne):
  """The target drafts for itself; `bits` and `group` as of `models.quantized`.

  With `layers` the decoder has some of its layers alone, as in self-speculative
  decoding (Zhang et al., arXiv 2309.08168): so many, evenly spread; a slice,
  such as '::2'; or their numbers, such as '0,1,5'. Norms, the encoder and
  embeddings that are not read as logits are the target's own arrays; the cache
  is the drafter's.
  """

  bits: int = option(4, "of the target's weights as they draft: 8, 4 or 3")
  group: int | None = option(
    None,
    'number of weights that share a scale (default: all of an output)',
    type=positive_int,
  )
  layers: Layers | None = option(
    None,
    'layers of the decoder that draft: how many, evenly spread, a slice such '
    'as ::2, or numbers such as 0,1,5 (default: all)',
    type=_layers,
  )

  def make(self, target: Target, length: lengths.Length) -> Drafting:
    name = f'int{self.bits}' + ('' if self.group is None else f':{self.group}')
    bits, config = quantized.bits_of(name), target.config
    # Of encoder and decoder, the decoder's stack is the last.
    *_, (field, branch) = families.of(config).stacks.items()
    layers = _layer_numbers(self.layers, getattr(config, field))
    model = families.language_model(_shortened(config, field, layers))
    return Drafting(
      drafter=one_by_one.drafter(model, target, length, min_prob=self.min_prob),
      join=lambda target_params, _: _params(
        target_params, branch, layers, bits, is_tied=config.is_tied
      ),
      chain=as_chain(model),
    )


def _layer_numbers(layers: Layers | None, count: int) -> tuple[int, ...]:
  """Returns which of `count` layers draft, ascending; ValueError if none does,
  or one is not there."""
  every = range(count)
  try:
    match layers:
      case None:
        return tuple(every)
      case int():
        # Of 6 layers 4: 0, 2, 3 and 5.
        spread = np.linspace(0, count - 1, layers).round()
        numbers = tuple(map(int, spread))
      case str() if ':' in layers:
        ends = [int(end) if end else None for end in layers.split(':')]
        numbers = tuple(every[slice(*ends)])
      case _:
        parts = layers.split(',') if isinstance(layers, str) else layers
        numbers = tuple(map(int, parts))
  except (TypeError, ValueError) as error:
    raise ValueError(
      f'layers {layers!r} is no number, no slice such as ::2, no list as 0,1,5'
    ) from error
  if not numbers or sorted({*numbers} & {*every}) != [*numbers]:
    raise ValueError(
      f'layers {layers!r} should be some of 0 to {count - 1}, ascending'
    )
  return numbers


def _shortened(config: Config, field: str, layers: Sequence[int]) -> Config:
  """Returns the sizes of a model whose decoder has only these layers."""
  family = families.of(config)
  if not family.has_equal_layers and len(layers) < getattr(config, field):
    raise ValueError(
      f'layers {layers}: those of a {family.name} differ, and some read the '
      'keys of others; leave layers out, for all of them'
    )
  sizes: dict[str, Any] = {field: len(layers)}
  # `windows` lists those of the first layers, and repeats.
  if windows := getattr(config, 'windows', ()):
    window_of = lambda layer: windows[layer % len(windows)]
    decoder_windows = tuple(map(window_of, layers))
    if not families.has_encoder(config):
      sizes['windows'] = decoder_windows
    elif decoder_windows != tuple(map(window_of, range(len(layers)))):
      raise ValueError(f'layers {layers}: windows of the encoder would change')
  return dataclasses.replace(config, **sizes)


def _params(
  target: Arrays,
  branch: str,
  layers: Sequence[int],
  bits: Bits,
  *,
  is_tied: bool,
) -> Arrays:
  """Takes the drafter's parameters, or their shapes, from a target's."""
  stack = target[branch] if branch else target
  # With layers 0 and 2, `layers_2` becomes `layers_1`.
  renumbered = {
    f'layers_{i}': stack[f'layers_{layer}'] for i, layer in enumerate(layers)
  }
  rest = {k: x for k, x in stack.items() if not k.startswith('layers_')}
  stack = rest | renumbered
  params = {**target, branch: stack} if branch else stack
  keep = {'encoder', 'per_layer_embedder'}
  if not is_tied:
    keep.add('embedding')
  return quantized.packed(params, bits, keep=keep)
