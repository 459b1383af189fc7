"""The tokens of a text file."""

import numpy as np

from specdec_jax.files import text_lines
from specdec_jax.files.paths import user_path
from specdec_jax.text.vocabularies import AnyVocabulary


def tokens_of_file(
  path: str, vocabulary: AnyVocabulary, *, option: str
) -> np.ndarray:
  """Reads the tokens of the text file that an option names; ValueError, which
  names the option, if it cannot be read, is no text, or is empty."""
  try:
    text = text_lines.read_whole(user_path(path))
  except ValueError as error:
    raise ValueError(f'{option}: {error}') from error
  tokens = vocabulary.encode(text, add_special_tokens=False)
  if not tokens:
    raise ValueError(f'{option}: {path} holds no text')
  return np.asarray(tokens, np.int32)
