"""Models of named sizes with random weights: `random:t5_1_1_xxl`.

For timing shapes whose checkpoints are not at hand. Their text is noise.
"""

import jax
import jax.numpy as jnp

from specdec_jax.models import families, presets
from specdec_jax.models.families import Config, DrafterConfig
from specdec_jax.models.t5 import T5Config
from specdec_jax.text import vocabularies
from specdec_jax.text.vocabularies import Vocabulary

PREFIX = 'random:'


def read_config(name: str, *, dtype: jnp.dtype) -> T5Config:
  """The sizes that `random:` and a name of `models.presets` stand for.

  Raises:
    ValueError: if there are no such sizes.
  """
  return presets.preset(name.removeprefix(PREFIX), dtype=dtype)


def draw(config: Config | DrafterConfig) -> dict:
  """Normal weights of the scale that keeps activations of one size."""
  shapes = families.param_shapes(config)
  leaves, structure = jax.tree.flatten(shapes)

  @jax.jit
  def draw_all(key: jax.Array):
    keys = jax.random.split(key, len(leaves))
    return [_draw(k, leaf) for k, leaf in zip(keys, leaves, strict=True)]

  return jax.tree.unflatten(structure, draw_all(jax.random.key(0)))


def _draw(key: jax.Array, leaf: jax.ShapeDtypeStruct) -> jax.Array:
  if len(leaf.shape) == 1:
    return jnp.ones(leaf.shape, leaf.dtype)
  scale = jnp.asarray(leaf.shape[0] ** -0.5, leaf.dtype)
  return jax.random.normal(key, leaf.shape, leaf.dtype) * scale


def vocabulary() -> Vocabulary:
  """A token for every byte, none that ends a text, and padding as id 0."""
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
  return Vocabulary(tokenizer=tokenizer)
