"""Models of the Hugging Face hub."""

import re
from pathlib import Path

from specdec_jax.files.require import require

# Files of a repository that are downloaded.
_DOWNLOADED = ['*.json', '*.safetensors', '*.jinja', 'spiece.model']


def download(repository: str) -> Path:
  """Returns the folder of a model of the Hugging Face hub, downloaded unless
  cached: `organisation/name`, or `organisation/name@revision` with a branch,
  tag or commit. Raises ValueError if the name is malformed or the download
  fails, and ImportError without the huggingface_hub package."""
  # `organisation/name@main`; a name without `@` is of the newest commit.
  match = re.fullmatch(r'([^/@]+/[^/@]+)(?:@(.+))?', repository)
  if not match:
    raise ValueError(
      f'hf:{repository}: write hf:organisation/name or '
      'hf:organisation/name@revision'
    )
  hub = require('huggingface_hub', extra='models', purpose='an hf: name')
  try:
    folder = hub.snapshot_download(
      match[1],
      revision=match[2],
      allow_patterns=_DOWNLOADED,
      # Mistral's own copy of the same weights.
      ignore_patterns=['consolidated*'],
    )
  except Exception as error:  # The network stack raises many types.
    raise ValueError(
      f'hf:{repository} could not be downloaded ({type(error).__name__}: '
      f'{error}). Without a network, pass the path of a downloaded folder'
    ) from error
  return Path(folder)
