"""Our parameters as the tensors of other systems' files."""

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from flax import traverse_util

from specdec_jax.checkpoints import stored_arrays
from specdec_jax.models import families, quantized
from specdec_jax.models.families import AnyConfig
from specdec_jax.models.products import Weights

# Other formats have matrices as `[out, in]`, positions as `[buckets, heads]`.
_TRANSPOSED = ('/kernel', '/router_kernel', '/rel_embedding')
# On a CPU jax copies an array unless its memory is aligned to so many bytes.
_ALIGNMENT = 64


@dataclasses.dataclass(frozen=True)
class Parameter:
  """One parameter and its name in a file.

  Attributes:
    path: its keys in our tree, outermost first, joined by slashes.
    name: its name in the file.
    shape: its shape in our tree.
    is_transposed: whether the file stores it with the last two axes swapped.
    dtype: its dtype in our tree, for integers and their scales; otherwise None.
    parts: names of the tensors in the file, if there is one per index of the
      axes before the last two, such as one per expert.
    file_shape: the tensor's shape in the file, if axes are joined there.
  """

  path: str
  name: str
  shape: tuple[int, ...]
  is_transposed: bool = False
  dtype: np.dtype | None = None
  parts: tuple[str, ...] = ()
  file_shape: tuple[int, ...] | None = None

  @property
  def names(self) -> tuple[str, ...]:
    """The names of its tensors in the file."""
    return self.parts or (self.name,)

  @property
  def _transposed_shape(self) -> tuple[int, ...]:
    """The shape with its axes in the order of the file."""
    if not self.is_transposed:
      return self.shape
    return (*self.shape[:-2], self.shape[-1], self.shape[-2])

  @property
  def in_file(self) -> jax.ShapeDtypeStruct:
    """Shape and dtype of a tensor in the file, slowest axis first; float32
    stands for every float dtype."""
    shape = self.file_shape or self._transposed_shape
    if self.parts:
      shape = shape[-2:]
    return jax.ShapeDtypeStruct(shape, self.dtype or np.float32)

  def from_tensors(self, tensors: Sequence[np.ndarray]) -> np.ndarray:
    """Returns the parameter, perhaps a view, from its tensors in the file."""
    values = np.stack(tensors) if self.parts else tensors[0]
    values = values.reshape(self._transposed_shape)
    return values.swapaxes(-1, -2) if self.is_transposed else values

  def to_tensors(self, values: np.ndarray) -> Sequence[np.ndarray]:
    """Reverses `from_tensors`: tensors in the order of `names`."""
    if self.is_transposed:
      values = values.swapaxes(-1, -2)
    return list(values.reshape(len(self.names), *self.in_file.shape))


def of(
  config: AnyConfig,
  name_of: Callable[[str], str] | None = None,
  shapes: Weights | None = None,
) -> tuple[Parameter, ...]:
  """Returns every parameter of a network, those outside of its layers first.

  `name_of` maps a path in our tree to the file's name for it. Without it, names
  are the paths, and nothing is transposed, as in our own files. `shapes`
  replaces the network's, for packed weights.
  """
  # Fewest slashes first: embeddings and the last norm, then the layers.
  leaves = stored_arrays.flatten(shapes or families.param_shapes(config))
  return tuple(
    Parameter(
      path,
      name_of(path) if name_of else path,
      leaves[path].shape,
      is_transposed=bool(name_of) and path.endswith(_TRANSPOSED),
      dtype=_stored_dtype(path, leaves[path].dtype),
    )
    for path in sorted(leaves, key=lambda path: path.count('/'))
  )


def _stored_dtype(path: str, dtype: np.dtype) -> np.dtype | None:
  """Returns the dtype of integers and their scales; other arrays are cast."""
  is_scale = quantized.is_scale(path.split('/')[-1])
  is_fixed = is_scale or jnp.issubdtype(dtype, jnp.integer)
  return dtype if is_fixed else None


def named(
  config: AnyConfig, names: Mapping[str, str], layer: str
) -> tuple[Parameter, ...]:
  """Returns every parameter of a network, by `renamed`."""
  return of(config, lambda path: renamed(path, names, layer))


def renamed(path: str, names: Mapping[str, str], layer: str) -> str:
  """Returns a parameter's name in a file that ends names in weight or bias.
  `names` are the file's names of our branches, `layer` its name of `layers_N`,
  with `{}` in place of the N."""
  # A Llama's `layers_3/mlp/wo/kernel`: `model.layers.3.mlp.down_proj.weight`.
  branch, leaf = path.rsplit('/', 1)
  prefix = ''
  if branch.startswith('layers_'):
    number, branch = branch.removeprefix('layers_').split('/', 1)
    prefix = layer.format(number) + '.'
  return f'{prefix}{names[branch]}.{"bias" if leaf == "bias" else "weight"}'


def read_all(
  read: Callable[[Parameter, str], np.ndarray],
  parameters: Sequence[Parameter],
  dtype: jnp.dtype,
) -> Weights:
  """Returns the tensors of a file as our tree, converted by a few threads;
  `read(parameter, name)` returns a tensor of the shape `parameter.in_file`."""

  def to_device(parameter: Parameter) -> jax.Array:
    # A transposed view is copied in one pass with the change of its dtype.
    tensors = [read(parameter, name) for name in parameter.names]
    values = parameter.from_tensors(tensors)
    placed = _empty(values.shape, np.dtype(parameter.dtype or dtype))
    placed[...] = values
    return jax.device_put(placed)

  arrays = stored_arrays.in_threads(to_device, parameters)
  tree = {p.path: array for p, array in zip(parameters, arrays, strict=True)}
  return traverse_util.unflatten_dict(tree, sep='/')


def _empty(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
  """Returns an array so aligned that jax on a CPU uses it without a copy."""
  # If the memory begins at byte 16 of 64, the first 48 are left out.
  num_bytes = math.prod(shape) * dtype.itemsize
  memory = np.empty(num_bytes + _ALIGNMENT, np.uint8)
  start = -memory.ctypes.data % _ALIGNMENT
  return memory[start : start + num_bytes].view(dtype).reshape(shape)


def is_all_finite(values: np.ndarray) -> bool:
  """Tells whether a float32 array holds neither NaN nor infinity."""
  # One pass over the memory, where `isfinite` alone would make an array of it.
  with np.errstate(all='ignore'):
    # The sum is finite unless a term is not, or it overflows: then look.
    return bool(np.isfinite(values.sum()) or np.isfinite(values).all())
