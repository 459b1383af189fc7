"""Models, drafters and meshes for `infer`, as gin files name them.

Nothing here reads weights before it is asked to, so that a dry run can speak of
models that are not there.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from specdec_jax import drafters
from specdec_jax.base import Drafter, LanguageModel, LogitsToProbsFn
from specdec_jax.checkpoints import loading
from specdec_jax.data import ngram_counts
from specdec_jax.drafters.schedules import Schedule
from specdec_jax.models import families, presets
from specdec_jax.models.families import Config, DrafterConfig
from specdec_jax.sharding import mesh as mesh_lib
from specdec_jax.text import vocabularies, vocabulary_files
from specdec_jax.text.vocabulary_files import AnyVocabulary

# From a tree of shapes to one of shardings.
Shardings = Callable[[Any], Any]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Model:
  """A model by name.

  Attributes:
    checkpoint: see `checkpoints.loading.load`.
    sizes: a name of `models.presets` or the path of a model.json, for a T5X
      checkpoint, which does not state its sizes.
    vocabulary: the path of a SentencePiece model or of a folder with a
      vocabulary; None for that beside the checkpoint.
    dtype: 'float32' or 'bfloat16', of weights, activations and caches.
  """

  checkpoint: str
  sizes: str | None = None
  vocabulary: str | None = None
  dtype: str = 'bfloat16'

  def __post_init__(self):
    if self.dtype not in presets.DTYPES:
      raise ValueError(
        f'dtype is {self.dtype!r}, expected {" or ".join(presets.DTYPES)}'
      )


def read_config(model: Model) -> Config:
  """The sizes of a model; named ones without a look at its checkpoint.

  Raises:
    ValueError: if there is no such model, or it does not state its sizes.
  """
  dtype = jnp.dtype(model.dtype)
  if model.sizes in presets.PRESETS:
    return presets.preset(model.sizes, dtype=dtype)
  path = loading.locate(model.checkpoint)
  return loading.read_config(path, dtype=dtype, config=model.sizes)


def read_vocabulary(model: Model, config: Config) -> AnyVocabulary:
  """The vocabulary of a model.

  Raises:
    ValueError: if it has none, or one of another size.
  """
  path, num_rows = loading.locate(model.checkpoint), config.vocab_size
  if model.vocabulary is not None:
    vocabulary = vocabulary_files.read(model.vocabulary, num_rows=num_rows)
  elif found := loading.read_vocabulary(path, num_rows=num_rows):
    vocabulary = found
  else:
    raise ValueError(
      f'{path} has no vocabulary: put {vocabulary_files.SENTENCEPIECE} beside '
      'it, or bind VOCABULARY to the path of one'
    )
  loading.check_vocabulary(path, vocabulary, config)
  return vocabulary


def read_params(
  model: Model, config: Config | DrafterConfig, shardings: Shardings
) -> Any:
  """The weights, each where `shardings` of their shapes wants it.

  Raises:
    ValueError: if the checkpoint has other arrays.
  """
  path = loading.locate(model.checkpoint)
  return loading.read_params(path, config, shardings=shardings)


def target_shardings(mesh: Mesh) -> Shardings:
  """Split over the mesh, which has to divide the model."""
  return lambda shapes: mesh_lib.parameter_shardings(mesh, shapes)


def drafter_shardings(mesh: Mesh) -> Shardings:
  """Split likewise, or, where the mesh does not divide so small a model, whole
  on every chip."""

  def place(shapes: Any) -> Any:
    try:
      mesh_lib.check_divides(mesh, shapes, batch_size=mesh.size)
    except ValueError:
      whole = NamedSharding(mesh, PartitionSpec())
      return jax.tree.map(lambda _: whole, shapes)
    return mesh_lib.parameter_shardings(mesh, shapes)

  return place


def param_shapes(config: Config | DrafterConfig) -> Any:
  """The tree of weights as shapes."""
  return families.param_shapes(config)


def language_model(config: Config) -> LanguageModel:
  """The three functions of a model of these sizes."""
  return families.language_model(config)


def device_mesh(
  *,
  num_partitions: int | None = 1,
  model_parallel_submesh: Sequence[int] | None = None,
  num_devices: int | None = None,
) -> Mesh:
  """The devices that decode, by `sharding.mesh.make`.

  Args:
    num_partitions: devices that share one copy of the model; None for the
      default of this kind of device.
    model_parallel_submesh: the same as a box of a TPU slice.
    num_devices: the first so many; None for all.

  Raises:
    ValueError: if there are not so many, or they do not divide.
  """
  mesh_lib.check_devices(1 if num_devices is None else num_devices)
  if model_parallel_submesh is not None:
    num_partitions = None
  return mesh_lib.make(
    num_partitions=num_partitions,
    model_parallel_submesh=model_parallel_submesh,
    devices=jax.devices()[:num_devices],
  )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Target:
  """What a drafter may know of the target.

  Attributes:
    config: sizes.
    vocabulary: None in a dry run.
    sampled: `(vocab_size) -> logits_to_probs`, how both sides are sampled.
  """

  config: Config
  vocabulary: AnyVocabulary | None
  sampled: Callable[[int], LogitsToProbsFn]

  @property
  def vocab_size(self) -> int:
    """Ids with a token; the others are padding."""
    if self.vocabulary is None:
      return self.config.vocab_size
    return self.vocabulary.vocab_size


@dataclasses.dataclass(frozen=True, kw_only=True)
class Drafting:
  """A drafter and the model that it needs, if any."""

  drafter: Drafter
  model: Model | None = None
  config: Config | DrafterConfig | None = None


# A drafter for a target; gin binds the other arguments.
MakeDrafter = Callable[[Target], Drafting]


def no_drafter(target: Target) -> Drafting:
  """Plain decoding, through the same loop."""
  del target
  return Drafting(drafter=drafters.none())


def prompt_lookup(
  target: Target, *, gamma: int = 8, max_ngram: int = 3, min_ngram: int = 2
) -> Drafting:
  """Copies from the context; see `drafters.prompt_lookup`."""
  del target
  return Drafting(
    drafter=drafters.prompt_lookup(
      gamma=gamma, max_ngram=max_ngram, min_ngram=min_ngram
    )
  )


def uniform(target: Target, *, gamma: int = 4) -> Drafting:
  """Guesses at random; see `drafters.uniform`."""
  return Drafting(
    drafter=drafters.uniform(
      gamma=gamma,
      vocab_size=target.vocab_size,
      padded_vocab_size=target.config.vocab_size,
    )
  )


def ngram(
  target: Target, *, text: str, gamma: int = 4, is_sampled: bool = False
) -> Drafting:
  """Counts a text file; see `drafters.ngram`.

  Args:
    target: whose vocabulary counts.
    text: path of the file.
    gamma: tokens an iteration.
    is_sampled: draws from the table; else takes the likeliest.
  """
  if target.vocabulary is None:
    raise ValueError('a dry run counts no text: leave the n-gram drafter out')
  tokens = ngram_counts.tokens_of_file(text, target.vocabulary)
  table = ngram_counts.estimate(tokens, vocab_size=target.config.vocab_size)
  sampled = target.sampled(target.vocab_size) if is_sampled else None
  return Drafting(
    drafter=drafters.ngram(table, gamma=gamma, logits_to_probs=sampled)
  )


def draft_model(
  target: Target,
  *,
  model: Model,
  gamma: int = 4,
  schedule: Schedule | None = None,
  min_prob: float = 0.0,
) -> Drafting:
  """A smaller model; see `drafters.autoregressive`.

  Args:
    target: whose vocabulary it must have.
    model: the smaller one.
    gamma: tokens an iteration.
    schedule: with it, or with `min_prob`, gamma is the most that is drafted;
      see `drafters.adaptive`.
    min_prob: likewise.

  Raises:
    ValueError: if it has another vocabulary, or `min_prob` is no probability.
  """
  config = read_config(model)
  if target.vocabulary is not None:
    vocabularies.check_same_vocabulary(
      target.vocabulary, read_vocabulary(model, config)
    )
  elif not loading.is_padding(config.vocab_size - target.config.vocab_size):
    raise ValueError(
      f'the target has {target.config.vocab_size} logits, the draft model '
      f'{config.vocab_size}'
    )
  make = drafters.autoregressive
  if schedule is not None or min_prob:
    make = functools.partial(
      drafters.adaptive, schedule=schedule, min_prob=min_prob
    )
  drafter = make(
    families.with_logits_of(language_model(config), target.config.vocab_size),
    gamma=gamma,
    logits_to_probs=target.sampled(target.vocab_size),
  )
  return Drafting(drafter=drafter, model=model, config=config)


def spec_drafter(target: Target, *, model: Model, gamma: int = 25) -> Drafting:
  """A block in one pass; see `drafters.spec_drafter`.

  Args:
    target: whose vocabulary it must have.
    model: the folder that `specdec train` wrote; in a dry run, `sizes` alone,
      a name of `presets.SPEC_DRAFTERS`, will do.
    gamma: k, tokens an iteration.

  Raises:
    ValueError: if it is no Spec-Drafter, or has another vocabulary.
  """
  dtype = jnp.dtype(model.dtype)
  config: Any
  if model.sizes is not None:
    config = presets.spec_drafter(model.sizes, dtype=dtype)
  else:
    config = loading.read_drafter_config(model.checkpoint, dtype=dtype)
  if families.of(config).block_model is None:
    raise ValueError(f'{model.checkpoint} is no Spec-Drafter')
  if config.vocab_size != target.config.vocab_size:
    raise ValueError(
      f'the target has {target.config.vocab_size} logits, the Spec-Drafter '
      f'{config.vocab_size}'
    )
  drafter = drafters.spec_drafter(
    families.block_model(config), gamma=gamma, vocab_size=target.vocab_size
  )
  return Drafting(drafter=drafter, model=model, config=config)
