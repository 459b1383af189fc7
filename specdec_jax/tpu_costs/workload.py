"""A decode to be compiled for a slice: its models, prompts and caches as shapes
that lie where the project's sharding rules put them."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from specdec_jax.base import LanguageModel, Prompt
from specdec_jax.models import families
from specdec_jax.models.t5 import T5Config
from specdec_jax.sharding import mesh as mesh_lib
from specdec_jax.sharding import rules
from specdec_jax.tpu_costs.aot import Slice


@dataclasses.dataclass(frozen=True, kw_only=True)
class Workload:
  """What is to be decoded, and on what; raises ValueError for a number below 1.

  Attributes:
    slice: the TPUs.
    target: sizes of the target; its dtype is that of weights and caches.
    draft: sizes of the draft model.
    batch_size: rows decoded together.
    input_length: tokens of the encoder, or of a decoder-only model's prompt.
    output_length: new tokens per row.
    num_partitions: chips that share a copy of the target.
  """

  slice: Slice
  target: T5Config
  draft: T5Config
  batch_size: int
  input_length: int
  output_length: int
  num_partitions: int

  def __post_init__(self):
    numbers = ('batch_size', 'input_length', 'output_length', 'num_partitions')
    for name in numbers:
      if (value := getattr(self, name)) < 1:
        raise ValueError(f'{name} must be at least 1, got {value}')

  @property
  def max_len(self) -> int:
    """The longest that a row can be."""
    is_encoder = bool(self.target.num_encoder_layers)
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


@dataclasses.dataclass(frozen=True, kw_only=True)
class Shapes:
  """A model's arguments as shapes with shardings; `mesh` is None for a model
  that every chip has a whole copy of."""

  model: LanguageModel
  params: Any
  prompt: Prompt
  cache: Any
  mesh: Mesh | None


def model_shapes(
  workload: Workload,
  config: T5Config,
  max_gamma: int,
  notes: list[str],
) -> Shapes:
  """A model on the mesh; a draft model that does not divide is replicated, and
  `notes` get a sentence that says so."""
  mesh, is_split = workload.mesh, True
  params = families.param_shapes(config)
  try:
    mesh_lib.check_divides(mesh, params, batch_size=workload.batch_size)
    shardings = mesh_lib.parameter_shardings(mesh, params)
  except ValueError as error:
    if config is not workload.draft:
      raise
    notes.append(f'Every chip has the whole draft model, since {error}.')
    is_split, whole = False, NamedSharding(mesh, PartitionSpec())
    shardings = jax.tree.map(lambda leaf: whole, params)
  params = jax.tree.map(_with_sharding, params, shardings)
  model = families.language_model(config)
  prompt = _prompt_shapes(workload, config)
  capacity = workload.max_len + max_gamma + 1
  cache = jax.eval_shape(
    lambda params, prompt: model.init(params, prompt, capacity), params, prompt
  )
  return Shapes(
    model=model,
    params=params,
    prompt=prompt,
    cache=on_mesh(workload, cache, is_split=is_split),
    mesh=mesh if is_split else None,
  )


def _prompt_shapes(workload: Workload, config: T5Config) -> Prompt:
  """A prompt's shapes; every row has its input length."""
  # A shape stands for an array wherever one is traced.
  array: Any = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.int32)
  batch_size, length = workload.batch_size, workload.input_length
  is_encoder = bool(config.num_encoder_layers)
  prompt = Prompt(
    encoder_tokens=array(batch_size, length) if is_encoder else None,
    decoder_tokens=array(batch_size, 1 if is_encoder else length),
    decoder_lengths=array(batch_size),
    row_ids=array(batch_size),
  )
  return on_mesh(workload, prompt)


def _with_sharding(leaf: Any, sharding: Any) -> jax.ShapeDtypeStruct:
  return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)


def on_mesh(workload: Workload, tree: Any, *, is_split: bool = True) -> Any:
  """Rows over `data`, the heads of caches over `model`."""
  mesh = workload.mesh
  sizes = dict(mesh.shape)

  def place(leaf: Any) -> jax.ShapeDtypeStruct:
    names = ('batch', 'heads', None, None)[: len(leaf.shape)]
    is_cache = len(leaf.shape) == 4 and is_split
    axes = [
      axis
      if axis and size % sizes[axis] == 0 and (i == 0 or is_cache)
      else None
      for i, (axis, size) in enumerate(
        zip(rules.partition_spec(names), leaf.shape, strict=False)
      )
    ]
    return _with_sharding(leaf, NamedSharding(mesh, PartitionSpec(*axes)))

  return jax.tree.map(place, tree)


def key_shape(workload: Workload) -> Any:
  """A random key's."""
  return on_mesh(workload, jax.eval_shape(lambda: jax.random.key(0)))
