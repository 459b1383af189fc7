"""The weights of a task in the formats of the other systems."""

import subprocess
import sys
from pathlib import Path

import numpy as np

from experiments.peers.systems import Task
from specdec_jax.checkpoints import pretrained
from specdec_jax.files.require import require

QUANTISED, FLOAT32 = 'as_shipped.gguf', 'float32.gguf'


def write(task: Task) -> None:
  """Writes what is not there yet: Hugging Face folders in float32, and of a
  model that comes as GGUF that file and the same in float32.

  Raises:
    subprocess.CalledProcessError: if a model cannot be had, which the command
      has said.
  """
  task.folder.mkdir(parents=True, exist_ok=True)
  parts = {'target': task.model, 'drafter': task.draft_model}
  for part, model in parts.items():
    folder = task.folder / part
    if model is None or folder.exists():
      continue
    command = ['convert', '--to', 'huggingface', model, str(folder)]
    subprocess.run(
      [sys.executable, '-m', 'specdec_jax', *command],
      check=True,
      stdout=subprocess.DEVNULL,
    )
  if has_gguf(task):
    shipped = task.folder / QUANTISED
    if not shipped.exists():
      # A link into an environment that is gone.
      shipped.unlink(missing_ok=True)
      shipped.symlink_to(pretrained.packaged_file(task.model))
    if not (task.folder / FLOAT32).exists():
      _dequantise(shipped, task.folder / FLOAT32)


def has_gguf(task: Task) -> bool:
  """Whether llama.cpp can have the model."""
  return task.model in pretrained.PACKAGED and task.draft_model is None


def _dequantise(source: Path, destination: Path) -> None:
  """Writes a GGUF file with the same fields, and every tensor in float32."""
  gguf = require('gguf', extra='peers', purpose='a GGUF file in float32')
  reader = gguf.GGUFReader(source)
  architecture = reader.fields['general.architecture'].contents()
  part = destination.with_suffix('.part')
  writer = gguf.GGUFWriter(part, architecture)
  for name, field in reader.fields.items():
    # The writer has its own of these.
    if name.startswith('GGUF.') or name == 'general.architecture':
      continue
    kinds = [*field.types, None]
    value = field.contents()
    if name == 'general.file_type':
      value = int(gguf.LlamaFileType.ALL_F32)
    writer.add_key_value(name, value, kinds[0], sub_type=kinds[1])
  for tensor in reader.tensors:
    values = gguf.dequantize(tensor.data, tensor.tensor_type)
    writer.add_tensor(tensor.name, np.asarray(values, np.float32))
  writer.write_header_to_file()
  writer.write_kv_data_to_file()
  writer.write_tensors_to_file()
  writer.close()
  part.rename(destination)
