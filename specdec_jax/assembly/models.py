"""Models by name, for every entry point."""

import contextlib
import dataclasses
import functools
from collections.abc import Callable
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np

from specdec_jax.base import Arrays
from specdec_jax.checkpoints import formats, loading
from specdec_jax.checkpoints.formats import Shardings
from specdec_jax.files import settings
from specdec_jax.models import families, presets, products, quantized
from specdec_jax.models.drafting import draft_vocabulary
from specdec_jax.models.families import AnyConfig, Config, DrafterConfig
from specdec_jax.text import vocabularies

# Before names of sizes: models with random weights, to time shapes whose
# checkpoints are not at hand. Their text is noise.
RANDOM = 'random:'
# Runs while the weights of a model are read.
Waiting = Callable[[str], contextlib.AbstractContextManager]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Model:
  """A model by name.

  Attributes:
    checkpoint: see `checkpoints.loading.load`; also `random:` and the name of
      sizes, for random weights.
    sizes: a name of `models.presets` or the path of a model.json, for a T5X
      checkpoint, which does not state its sizes; or the sizes themselves, of a
      network whose weights are already at hand.
    vocabulary: the path of a SentencePiece model or of a folder with a
      vocabulary; None for that beside the checkpoint.
    dtype: 'float32' or 'bfloat16', of weights, activations and caches.
    weights: as which integers matrices are kept, see `models.quantized`:
      'int8', 'int4', or 'int4:64' with a scale for each 64; None for `dtype`,
      or as they lie in a packed checkpoint.
    cache_dtype: 'int8' keeps keys and values as integers, see
      `kv_cache.Packed`; None for `dtype`.
  """

  checkpoint: str
  sizes: str | AnyConfig | None = None
  vocabulary: str | None = None
  dtype: str = 'bfloat16'
  weights: str | None = None
  cache_dtype: str | None = None

  def __post_init__(self):
    if self.weights is not None:
      quantized.bits_of(self.weights)
    if self.cache_dtype not in (None, 'int8'):
      raise ValueError(
        f"cache_dtype is {self.cache_dtype!r}, expected 'int8', or None for "
        'that of the weights'
      )
    if self.dtype not in presets.DTYPES:
      expected = ' or '.join(map(repr, presets.DTYPES))
      raise ValueError(f'dtype is {self.dtype!r}, expected {expected}')
    if self.is_random and (self.sizes or self.vocabulary):
      raise ValueError(
        f'{self.checkpoint} has its own sizes and vocabulary: give no others'
      )

  @property
  def is_random(self) -> bool:
    return self.checkpoint.startswith(RANDOM)


def read_config(model: Model) -> Config:
  """Reads the sizes of a model; named ones need no checkpoint.

  Raises ValueError if there is no such model, or it does not state its sizes,
  or its cache is of no keys and values where these should be packed.
  """
  config = _sizes(model)
  if model.cache_dtype is None:
    return config
  if not hasattr(config, 'cache_dtype'):
    raise ValueError(
      f'{model.checkpoint} keeps no keys and values in {model.cache_dtype}: '
      'leave cache_dtype out'
    )
  return dataclasses.replace(config, cache_dtype=jnp.dtype(model.cache_dtype))


def _sizes(model: Model) -> Config:
  dtype = jnp.dtype(model.dtype)
  if model.is_random:
    name = model.checkpoint.removeprefix(RANDOM)
    return presets.preset(name, dtype=dtype)
  # `sizes` can be a config itself, as for T5X's draft model, which has no name.
  if not isinstance(model.sizes, str | None):
    return cast(Config, model.sizes)
  if model.sizes in presets.PRESETS:
    return presets.preset(model.sizes, dtype=dtype)
  path = loading.locate(model.checkpoint)
  return loading.read_config(path, dtype=dtype, config=model.sizes)


def read_drafter_config(model: Model, drafter: str) -> Any:
  """Reads a network's sizes; ValueError if it is for another `drafter`."""
  dtype = jnp.dtype(model.dtype)
  config: DrafterConfig
  if model.is_random:
    name = model.checkpoint.removeprefix(RANDOM)
    config = presets.drafter(name, dtype=dtype)
  elif isinstance(model.sizes, str):
    config = presets.drafter(model.sizes, dtype=dtype)
  elif model.sizes is not None:
    config = cast(DrafterConfig, model.sizes)
  else:
    path = loading.locate(model.checkpoint)
    config = formats.read_config(path, dtype)
  name = families.drafts_for(config) or 'model'
  if name != drafter:
    raise ValueError(f'{model.checkpoint} is for drafter {name}, not {drafter}')
  return config


def read_vocabulary(model: Model, config: Config) -> vocabularies.AnyVocabulary:
  """Reads a model's vocabulary; ValueError if it has none that fits."""
  if model.is_random:
    return _byte_vocabulary()
  path = loading.locate(model.checkpoint)
  return loading.vocabulary_of(path, config, model.vocabulary)


def read_draft_vocabulary(model: Model, vocab_size: int) -> np.ndarray | None:
  """Reads the tokens, int32 `[N]`, that alone a model drafts: the list `ids` in
  the file `draft_vocabulary.json` beside its weights; None without one, and
  for a model whose sizes are given. Raises ValueError unless they are different
  tokens of the target."""
  # Logits are most of a small model's cost, and few tokens make up most texts.
  # With sizes given, no file is read before the weights, as dry runs rely on.
  if model.is_random or model.sizes is not None:
    return None
  path = loading.locate(model.checkpoint) / formats.DRAFT_VOCABULARY
  if not path.is_file():
    return None
  stated = settings.read(path)
  ids = stated.ids('ids', vocab_size)
  if not ids or len(set(ids)) < len(ids):
    stated.refuse('ids', 'different token ids')
  return np.asarray(ids, np.int32)


def with_logits_of(params: Arrays, ids: np.ndarray, config: Config) -> Arrays:
  """Cuts a model's logits to those of `ids`: weights, or their shapes."""
  cut = functools.partial(
    draft_vocabulary.with_logits_of, ids=ids, is_tied=config.is_tied
  )
  is_shapes = isinstance(jax.tree.leaves(params)[0], jax.ShapeDtypeStruct)
  return jax.eval_shape(cut, params) if is_shapes else cut(params)


def read_params(
  model: Model,
  config: Config | DrafterConfig,
  shardings: Shardings | None = None,
) -> Any:
  """Reads the weights; ValueError if the checkpoint has other arrays.

  `shardings` says from their shapes where each is to be; None puts them on the
  default device. On a single device, whichever way it was named, they get the
  copies of `products.with_cpu_copies`. What is to be packed is read and packed
  on the host, where it is whole.
  """
  weights = _weights_of(model)
  if model.weights is None:
    params = _read(model, config, shardings)
    if weights is not None:
      params = quantized.packed(params, quantized.bits_of(weights))
  else:
    with formats.on_host():
      params = _read(model, config)
      params = quantized.packed(params, quantized.bits_of(model.weights))
      places = shardings(params) if shardings else jax.local_devices()[0]
      params = jax.device_put(params, places)
  if _num_devices(params) == 1:
    is_tied = getattr(config, 'is_tied', False)
    params = products.with_cpu_copies(params, is_tied=is_tied)
  return params


def _num_devices(params: Any) -> int:
  """Counts the devices that arrays lie on."""
  leaves = jax.tree.leaves(params)
  return len(set().union(*(leaf.sharding.device_set for leaf in leaves)))


def _read(
  model: Model,
  config: Config | DrafterConfig,
  shardings: Shardings | None = None,
) -> Any:
  if model.is_random:
    params = _draw_params(config)
    return jax.device_put(params, shardings(params)) if shardings else params
  path = loading.locate(model.checkpoint)
  return formats.read_params(path, config, shardings)


def param_shapes(model: Model | None, config: Config | DrafterConfig) -> Any:
  """Returns the tree of `read_params`, of `jax.ShapeDtypeStruct`s, unread."""
  shapes = families.param_shapes(config)
  weights = None if model is None else _weights_of(model)
  if weights is None:
    return shapes
  return quantized.packed(shapes, quantized.bits_of(weights))


def _weights_of(model: Model) -> str | None:
  """Returns how weights are packed: as was asked for, or as they are stored."""
  # With sizes given, no file is read before the weights, and none has packed
  # ones.
  if model.weights or model.is_random or model.sizes is not None:
    return model.weights
  path = loading.locate(model.checkpoint)
  return formats.find(path).read_weights(path)


def _draw_params(config: Config | DrafterConfig) -> dict:
  """Draws normal weights of the scale that keeps activations of one size."""
  # Leaves come in a fixed order, each with its own key: every run draws the
  # same.
  leaves, structure = jax.tree.flatten(families.param_shapes(config))

  def draw(key: jax.Array, leaf: jax.ShapeDtypeStruct) -> jax.Array:
    if jnp.issubdtype(leaf.dtype, jnp.integer):  # Ids of tokens.
      return jnp.arange(leaf.size, dtype=leaf.dtype).reshape(leaf.shape)
    if len(leaf.shape) == 1:  # Scales of norms.
      return jnp.ones(leaf.shape, leaf.dtype)
    # Kernels are [in, out], those of experts one after the other: scaled by
    # 1 / sqrt(in), outputs are as large as inputs.
    scale = jnp.asarray(leaf.shape[-2] ** -0.5, leaf.dtype)
    return jax.random.normal(key, leaf.shape, leaf.dtype) * scale

  @jax.jit
  def draw_all(key: jax.Array) -> list[jax.Array]:
    keys = jax.random.split(key, len(leaves))
    return [draw(k, leaf) for k, leaf in zip(keys, leaves, strict=True)]

  return jax.tree.unflatten(structure, draw_all(jax.random.key(0)))


def _byte_vocabulary() -> vocabularies.Vocabulary:
  """Makes a vocabulary of bytes, without EOS and with id 0 for padding."""
  tokenizers = vocabularies.import_tokenizers()
  alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
  tokenizer = tokenizers.Tokenizer(
    tokenizers.models.BPE(
      vocab={t: i for i, t in enumerate(['<pad>', *alphabet])}, merges=[]
    )
  )
  tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(
    add_prefix_space=False
  )
  tokenizer.decoder = tokenizers.decoders.ByteLevel()
  return vocabularies.Vocabulary(tokenizer=tokenizer)
