"""The models that come with this package, by name.

Each is a folder of `specdec_jax/pretrained`, with weights in bfloat16 and its
model card; the vocabulary that all of them share lies above them.
"""

from pathlib import Path

from specdec_jax.checkpoints import safetensors_folder

FOLDER = Path(__file__).resolve().parent.parent / 'pretrained'


def names() -> tuple[str, ...]:
  """What there is, such as `ende-mini`."""
  weights = FOLDER.glob(f'*/{safetensors_folder.SINGLE_FILE}')
  return tuple(sorted(path.parent.name for path in weights))


def is_one(path: Path) -> bool:
  """Whether a path is the folder of such a model."""
  return path.resolve().parent == FOLDER
