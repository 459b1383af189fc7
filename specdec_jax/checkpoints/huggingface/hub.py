"""Models of the Hugging Face hub."""

from pathlib import Path

from specdec_jax.files.require import require

# What is downloaded of a repository.
_FILES = ['*.json', '*.safetensors', '*.jinja', 'spiece.model']


def download(repository: str) -> Path:
  """Downloads a model from the Hugging Face hub, or finds it in its cache.

  Args:
    repository: `organisation/name`, or `organisation/name@revision` with a
      branch, tag or commit.

  Returns:
    The folder with its files.

  Raises:
    ValueError: if the name is malformed or the download fails.
    ImportError: if the huggingface_hub package is not installed.
  """
  name, at, revision = repository.partition('@')
  is_name = name.count('/') == 1 and all(name.split('/'))
  if not is_name or bool(at) != bool(revision):
    raise ValueError(
      f'hf:{repository} does not name a repository; write hf:organisation/name '
      'or hf:organisation/name@revision'
    )
  huggingface_hub = require(
    'huggingface_hub', extra='models', purpose='an hf: name'
  )
  try:
    return Path(
      huggingface_hub.snapshot_download(
        name, revision=revision or None, allow_patterns=_FILES
      )
    )
  except Exception as error:  # The network stack raises many kinds.
    raise ValueError(
      f'hf:{repository} could not be downloaded ({type(error).__name__}: '
      f'{error}). Without a network, give the path of a folder that holds it'
    ) from error
