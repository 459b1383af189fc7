"""What is to be decoded on a TPU slice that need not be there."""

import dataclasses
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding

from specdec_jax.models import families
from specdec_jax.models.eagle import EagleConfig
from specdec_jax.models.families import Config
from specdec_jax.sharding import mesh as mesh_lib
from specdec_jax.sharding import rules
from specdec_jax.tpu_costs.aot import Slice


@dataclasses.dataclass(frozen=True, kw_only=True)
class Workload:
  """What is to be decoded, and on what; raises ValueError for a number below 1.

  The dtype of `target` is that of weights and caches. `input_length` counts
  tokens of the encoder, or of a decoder-only model's prompt, `output_length`
  new tokens per row, `num_partitions` the chips that share a copy of the
  target.
  """

  slice: Slice
  target: Config
  draft: Config | EagleConfig
  batch_size: int
  input_length: int
  output_length: int
  num_partitions: int

  def __post_init__(self):
    numbers = ('batch_size', 'input_length', 'output_length', 'num_partitions')
    for name in numbers:
      if (value := getattr(self, name)) < 1:
        raise ValueError(f'{name} must be at least 1, got {value}')
    length = max(self.input_length, self.max_len)
    for config in (self.target, self.draft):
      limit = families.of(config).max_positions(config)
      if limit is not None and length > limit:
        raise ValueError(
          f'input_length {self.input_length} and output_length '
          f'{self.output_length} make {length} positions; a '
          f'{families.of(config).name} of these sizes has {limit}'
        )

  @property
  def max_len(self) -> int:
    """The longest that a row can be."""
    is_encoder = families.has_encoder(self.target)
    return (1 if is_encoder else self.input_length) + self.output_length

  @property
  def mesh(self) -> Mesh:
    return mesh_lib.make(
      num_partitions=self.num_partitions, devices=self.slice.devices
    )


def default_num_partitions(slice_: Slice, batch_size: int) -> int:
  """The mesh's default, or more chips per copy where the batch has too few
  rows to go round."""
  size = len(slice_.devices)
  partitions = mesh_lib.make(devices=slice_.devices).shape[rules.MODEL]
  while batch_size % (size // partitions) and partitions < size:
    partitions *= 2
  return partitions


def with_sharding(leaf: Any, sharding: Any) -> jax.ShapeDtypeStruct:
  """The shape, lying where a sharding says."""
  return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)


def on_mesh(workload: Workload, tree: Any, *, is_split: bool = True) -> Any:
  """Rows over `data`, the heads of caches over `model`."""
  mesh = workload.mesh

  def place(leaf: Any) -> jax.ShapeDtypeStruct:
    heads = 'heads' if leaf.ndim == 4 and is_split else None
    axes = ('batch', heads, *[None] * leaf.ndim)[: leaf.ndim]
    spec = rules.fitting_spec(mesh, leaf.shape, axes)
    return with_sharding(leaf, NamedSharding(mesh, spec))

  return jax.tree.map(place, tree)


def key_shape(workload: Workload) -> Any:
  """A random key's."""
  return on_mesh(workload, jax.eval_shape(lambda: jax.random.key(0)))
