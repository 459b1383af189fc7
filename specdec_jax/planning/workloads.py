"""What to decode on a TPU slice that is compiled for."""

import dataclasses
import itertools
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import jax.numpy as jnp
from jax.sharding import Mesh

from specdec_jax.assembly import decoder as decoder_lib
from specdec_jax.assembly import models
from specdec_jax.assembly.decoder import Decoder
from specdec_jax.assembly.drafters import DRAFTERS
from specdec_jax.assembly.models import Model
from specdec_jax.assembly.option_fields import chosen
from specdec_jax.assembly.text_settings import TextSettings
from specdec_jax.launch.spelling import did_you_mean
from specdec_jax.models import families, presets
from specdec_jax.models.families import AnyConfig
from specdec_jax.planning.aot import Slice
from specdec_jax.sharding import mesh as mesh_lib
from specdec_jax.sharding import rules

# Sizes of drafter networks, by name.
_NAMED = presets.PRESETS, presets.SPEC_DRAFTERS, presets.ASSISTANTS
# Names of networks that only draft.
_DRAFTERS = (
  *(presets.SPEC_DRAFTERS, presets.ASSISTANTS),
  *(presets.EAGLES, presets.BLOCKS),
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Workload:
  """What to decode on which chips; ValueError for more positions than the
  models have.

  Attributes:
    slice: the chips.
    decoder: of `assembly.decoder.outline`, without weights; caches have the
      dtype of its target.
    input_length: tokens of the encoder, or of a decoder-only model's prompt.
    output_length: new tokens per row.
    num_partitions: chips that share a copy of the target.
  """

  slice: Slice
  decoder: Decoder
  batch_size: int
  input_length: int
  output_length: int
  num_partitions: int

  def __post_init__(self):
    # Positions of the encoder, or of prompt and text.
    length = max(self.input_length, self.max_len)
    # Drafts are planned for the whole text.
    limit = min(self.decoder.max_positions, self.decoder.draft_positions)
    if length > limit:
      raise ValueError(
        f'input_length {self.input_length} and output_length '
        f'{self.output_length} make {length} positions; the models have {limit}'
      )

  @property
  def max_len(self) -> int:
    """The maximum length of a row."""
    is_encoder = families.has_encoder(self.decoder.config)
    return (1 if is_encoder else self.input_length) + self.output_length

  @property
  def mesh(self) -> Mesh:
    return mesh_lib.make(
      num_partitions=self.num_partitions, devices=self.slice.devices
    )


def default_num_partitions(slice_: Slice, batch_size: int) -> int:
  """Returns the mesh's default, or more chips per copy if the batch has fewer
  rows than there are copies."""
  # Of 8 chips and 2 rows: 4 chips share a copy, and each copy has a row.
  size = len(slice_.devices)
  partitions = mesh_lib.make(devices=slice_.devices).shape[rules.MODEL]
  sizes = range(partitions, size + 1)
  for num_partitions in sizes:
    if size % num_partitions == 0:
      num_copies = size // num_partitions
      if batch_size % num_copies == 0:
        return num_partitions
  raise AssertionError('a copy on all chips fits any batch')


def decoder_of(
  target: str,
  drafter: str,
  draft: str | None,
  *,
  dtype: str,
  weights: str | None = None,
  cache_dtype: str | None = None,
  options: Mapping[str, Any] = MappingProxyType({}),
) -> Decoder:
  """Makes a decoder without weights, sampled at temperature 1.

  `target` is a name of `models.presets`, `drafter` one of
  `assembly.drafters.DRAFTERS`, and `draft` the sizes of its network: a name of
  `presets` that is for it, or a folder; None for a drafter without weights.
  `weights` and `cache_dtype` are as for `Model`, and `options` are the
  drafter's. Raises ValueError if there are no such sizes, or they do not fit
  the target.
  """
  if any(target in named for named in _DRAFTERS):
    raise ValueError(f'{target} only drafts: give it as draft, not as target')
  _check_spelling(target, presets.PRESETS)
  model = Model(
    checkpoint=target,
    sizes=target,
    dtype=dtype,
    weights=weights,
    cache_dtype=cache_dtype,
  )
  draft_model = None
  if draft is not None:
    # Anything but a name of sizes is the path of a folder.
    sizes: str | AnyConfig | None = None
    if draft in presets.EAGLES:
      config = models.read_config(model)
      sizes = presets.eagle(draft, config, dtype=jnp.dtype(dtype))
    elif draft in presets.BLOCKS:
      config = models.read_config(model)
      sizes = presets.block(draft, config, dtype=jnp.dtype(dtype))
    elif any(draft in named for named in _NAMED):
      sizes = draft
    else:
      names = itertools.chain(*_NAMED, presets.EAGLES, presets.BLOCKS)
      _check_spelling(draft, names)
    draft_model = Model(checkpoint=draft, sizes=sizes, dtype=dtype)
  return decoder_lib.outline(
    model,
    drafter=chosen(
      'drafter', DRAFTERS, drafter, {**options, 'model': draft_model}
    ),
    sampling=TextSettings(temperature=1.0),
    is_dry_run=True,
  )


def _check_spelling(name: str, names: Iterable[str]) -> None:
  """Raises ValueError for a misspelt name of sizes that is not a path."""
  size_names = {*names}
  hint = did_you_mean(name, size_names, cutoff=0.85)
  if name not in size_names and hint and not Path(name).exists():
    raise ValueError(f'no sizes are called {name!r}{hint}')
