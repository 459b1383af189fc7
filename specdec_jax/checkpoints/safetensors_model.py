"""Any network of this package in model.safetensors, beside its model.json.

Unlike an Orbax checkpoint it can be read without Orbax and tensorstore. Tensors
have the shapes of our tree; their names are its keys joined by slashes.
"""

from pathlib import Path

from specdec_jax.checkpoints import model_file, parameters, safetensors_folder
from specdec_jax.models import quantized
from specdec_jax.models.families import AnyConfig
from specdec_jax.models.products import Weights


def save(folder: Path, config: AnyConfig, params: Weights) -> None:
  """Writes a model, replacing an earlier one; raises as `write_params`."""
  params = quantized.in_bytes(params)
  weights = quantized.name_of(params)
  wanted = _parameters(config, weights)
  safetensors_folder.write_params(folder, params, wanted)
  model_file.write(folder, config, weights)


def _parameters(
  config: AnyConfig, weights: str | None
) -> tuple[parameters.Parameter, ...]:
  return parameters.of(config, shapes=model_file.param_shapes(config, weights))


def is_model(folder: Path) -> bool:
  """Tells whether a folder is what `save` writes."""
  names = (model_file.NAME, safetensors_folder.SINGLE_FILE)
  return all((folder / name).is_file() for name in names)


def read_params(folder: Path, config: AnyConfig) -> Weights:
  """Reads the parameters that `save` wrote, in the config's dtype; raises
  ValueError if the file is incomplete, or holds other arrays."""
  tensors = safetensors_folder.open_tensors(folder, config)
  return safetensors_folder.read_params(
    folder,
    tensors,
    _parameters(config, model_file.read_weights(folder)),
    dtype=config.dtype,
  )
