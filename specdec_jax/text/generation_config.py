"""Generation settings of a Hugging Face folder: EOS ids, stop strings, and
settings that change even greedy decoding."""

from pathlib import Path
from typing import Any

from specdec_jax.files import settings
from specdec_jax.files.settings import Json, Settings

CONFIG = 'config.json'
GENERATION_CONFIG = 'generation_config.json'
# Settings of generation_config.json, or else of config.json, that change even
# greedy decoding, with the values that disable them; `stated` returns them.
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
# Such settings that only transformers supports; here they cause a warning.
NOT_HONOURED: Json = {
  'exponential_decay_length_penalty': None,
  'guidance_scale': 1.0,
  'penalty_alpha': 0.0,
  'watermarking_config': None,
}
# The setting that `read_stops` reads.
STOPS: Json = {'stop_strings': None}
# All of them.
NAMES = (*HONOURED, *NOT_HONOURED, *STOPS)


def read_eos_ids(folder: Path) -> tuple[int, ...]:
  """Reads the EOS ids of generation_config.json, or else of config.json."""
  # An empty list in the first file counts as missing.
  for name in (GENERATION_CONFIG, CONFIG):
    values = settings.read_if_any(folder / name)
    ids = values.ids('eos_token_id')
    if ids:
      return tuple(ids)
    # The sections of an encoder-decoder and of a multimodal model.
    for section in ('decoder', 'text_config'):
      ids = values.at(section).ids('eos_token_id')
      if ids:
        return tuple(ids)
  return ()


def read_stops(folder: Path) -> list[str]:
  """Reads the stop strings from the file that `stated` reads."""
  path, stop_settings = stated(folder, STOPS)
  values = Settings(path=path, values=stop_settings)
  [key] = STOPS
  if isinstance(stop_settings.get(key), str):
    return [values.text(key)]
  return [*filter(None, values.texts(key, []))]


def stated(
  folder: Path, defaults: Json = HONOURED
) -> tuple[str, dict[str, Any]]:
  """Reads a folder's generation settings: the path of their file, and the
  settings of `defaults` that have another value than there."""
  values = settings.read_if_any(folder / GENERATION_CONFIG)
  places = [values]
  if not values.values:
    values = settings.read_if_any(folder / CONFIG)
    places = [values, values.at('decoder'), values.at('text_config')]
  # If several places state a key, the first counts.
  settings_stated = {
    key: place.values[key]
    for place in reversed(places)
    for key, neutral in defaults.items()
    if place.values.get(key) not in (None, neutral, [], {})
  }
  # In transformers this one replaces `min_length`, also where it is 0.
  if any(place.values.get('min_new_tokens') is not None for place in places):
    settings_stated.pop('min_length', None)
  return values.path, settings_stated
