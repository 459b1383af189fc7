"""What a Hugging Face folder says of generation: where texts end, and settings
that change even greedy text."""

from pathlib import Path
from typing import Any

from specdec_jax.files import settings
from specdec_jax.files.settings import Json, Settings

CONFIG = 'config.json'
GENERATION_CONFIG = 'generation_config.json'
# Settings of generation_config.json, or without one of config.json, that change
# even greedy text, with the values that do not; `stated` returns them.
HONOURED: Json = {
  'bad_words_ids': None,
  'begin_suppress_tokens': None,
  'encoder_no_repeat_ngram_size': 0,
  'encoder_repetition_penalty': 1.0,
  'forced_bos_token_id': None,
  'forced_decoder_ids': None,
  'forced_eos_token_id': None,
  'min_length': 0,
  'min_new_tokens': 0,
  'no_repeat_ngram_size': 0,
  'repetition_penalty': 1.0,
  'sequence_bias': None,
  'suppress_tokens': None,
}
# Likewise settings that transformers honours, and that here cause a warning.
NOT_HONOURED: Json = {
  'exponential_decay_length_penalty': None,
  'guidance_scale': 1.0,
  'penalty_alpha': 0.0,
  'watermarking_config': None,
}
# What `read_stops` reads.
STOPS: Json = {'stop_strings': None}
# All of them.
NAMES = (*HONOURED, *NOT_HONOURED, *STOPS)


def read_eos_ids(folder: Path) -> tuple[int, ...]:
  """Reads the EOS ids of generation_config.json, or else of config.json."""
  # An empty list in the first file counts as none.
  for name in (GENERATION_CONFIG, CONFIG):
    values = settings.read_if_any(folder / name)
    if ids := values.ids('eos_token_id'):
      return tuple(ids)
    # Where an encoder-decoder, or a model that also sees, states them.
    for section in ('decoder', 'text_config'):
      if ids := values.at(section).ids('eos_token_id'):
        return tuple(ids)
  return ()


def read_stops(folder: Path) -> list[str]:
  """Reads the strings that end texts from the file that `stated` reads."""
  path, found = stated(folder, STOPS)
  values, [key] = Settings(path=path, values=found), STOPS
  if isinstance(found.get(key), str):
    return [values.text(key)]
  return [*filter(None, values.texts(key, []))]


def stated(folder: Path, known: Json = HONOURED) -> tuple[str, dict[str, Any]]:
  """Reads a folder's generation settings: the file they are in, and those among
  the names of `known` whose value is not the neutral one that `known` gives."""
  values = settings.read_if_any(folder / GENERATION_CONFIG)
  places = [values]
  if not values.values:
    values = settings.read_if_any(folder / CONFIG)
    places = [values, values.at('decoder'), values.at('text_config')]
  # If several places state a key, the first counts.
  settings_stated = {
    key: place.values[key]
    for place in reversed(places)
    for key, neutral in known.items()
    if place.values.get(key) not in (None, neutral, [], {})
  }
  # In transformers this one replaces `min_length`, also where it is 0.
  if any(place.values.get('min_new_tokens') is not None for place in places):
    settings_stated.pop('min_length', None)
  return values.path, settings_stated
