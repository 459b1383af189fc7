"""T5X's networks and parameters as this package's T5 (needs no T5X)."""

from typing import Any

import flax
import jax
import jax.numpy as jnp

from specdec_jax.models import families
from specdec_jax.models.t5 import T5Config

WHERE_TO_READ = 'see docs/t5x.md'

_SHARED_FIELDS = (
  'vocab_size',
  'dtype',
  'emb_dim',
  'num_heads',
  'head_dim',
  'mlp_dim',
  'mlp_activations',
  'dropout_rate',
  'logits_via_embedding',
)
# The fields of the configurations of `t5x.examples.t5` and of
# `t5x.examples.decoder_only`.
_ENCODER_DECODER_FIELDS = {
  *_SHARED_FIELDS,
  'num_encoder_layers',
  'num_decoder_layers',
  'float32_attention_logits',
}
_DECODER_ONLY_FIELDS = {*_SHARED_FIELDS, 'num_layers'}


def config_of(module: Any) -> T5Config:
  """The sizes of a T5X network.

  Args:
    module: `t5x.examples.t5.network.Transformer` or
      `t5x.examples.decoder_only.network.DecoderWrapper`.

  Raises:
    ValueError: if it is another network, which this package's T5 would not
      compute: one with scanned layers, for instance.
  """
  name = f'{type(module).__module__}.{type(module).__qualname__}'
  if getattr(module, 'scan_layers', False):
    raise ValueError(
      f'{name} scans its layers, which speculation does not support: use a '
      f'network of t5x.examples.t5 or of t5x.examples.decoder_only; '
      f'{WHERE_TO_READ}'
    )
  sizes = getattr(module, 'config', None)
  fields = set(getattr(sizes, '__dataclass_fields__', ()))
  if fields not in (_ENCODER_DECODER_FIELDS, _DECODER_ONLY_FIELDS):
    known = min(
      (_ENCODER_DECODER_FIELDS, _DECODER_ONLY_FIELDS),
      key=lambda known: len(known ^ fields),
    )
    raise ValueError(
      f'{name} is not a network that speculation knows: its configuration '
      f'lacks {sorted(known - fields)} and has {sorted(fields - known)} '
      f'besides; {WHERE_TO_READ}'
    )
  assert sizes is not None
  return T5Config(
    vocab_size=sizes.vocab_size,
    embed_dim=sizes.emb_dim,
    num_encoder_layers=getattr(sizes, 'num_encoder_layers', 0),
    num_decoder_layers=(
      sizes.num_layers if 'num_layers' in fields else sizes.num_decoder_layers
    ),
    num_heads=sizes.num_heads,
    head_dim=sizes.head_dim,
    mlp_dim=sizes.mlp_dim,
    mlp_activations=_activations(sizes.mlp_activations),
    is_tied=sizes.logits_via_embedding,
    dtype=jnp.dtype(sizes.dtype),
    has_float32_scores=getattr(sizes, 'float32_attention_logits', False),
  )


def params_of(params: Any, config: T5Config, *, role: str) -> Any:
  """A network's parameters in the dtypes that T5X computes with.

  T5X rounds every kernel to the dtype of the activations where it uses it, and
  multiplies the last projection, and embeddings that serve as it, in float32.

  Args:
    params: the parameters, a frozen dictionary or a plain one.
    config: their sizes.
    role: what they are called in errors.

  Raises:
    ValueError: if names or shapes are not those of the network.
  """
  params = flax.core.unfreeze(params)
  expected = families.param_shapes(config)
  _check_shapes(params, expected, role)
  in_float32 = (
    ('token_embedder', 'embedding')
    if config.is_tied
    else ('logits_dense', 'kernel')
  )

  def cast(path, leaf):
    is_last = tuple(entry.key for entry in path)[-2:] == in_float32
    return leaf.astype(jnp.float32 if is_last else config.dtype)

  return jax.tree_util.tree_map_with_path(cast, params)


def _activations(activations: Any) -> tuple[str, ...]:
  """Names of activations that this package has.

  Raises:
    ValueError: if there are others.
  """
  known = ('gelu', 'relu', 'silu', 'linear')
  unknown = [each for each in activations if each not in known]
  if unknown:
    raise ValueError(
      f'mlp_activations {unknown} are none of {", ".join(known)}; '
      f'{WHERE_TO_READ}'
    )
  return tuple(activations)


def _check_shapes(params: Any, expected: Any, role: str) -> None:
  found = _shapes(params)
  wanted = _shapes(expected)
  for name in sorted(found.keys() | wanted.keys()):
    if found.get(name) != wanted.get(name):
      raise ValueError(
        f'parameter {name} of the {role} has shape '
        f'{found.get(name, "none: it is missing")}, and its network expects '
        f'{wanted.get(name, "no such parameter")}; {WHERE_TO_READ}'
      )


def _shapes(tree: Any) -> dict[str, tuple[int, ...]]:
  return {
    '/'.join(str(entry.key) for entry in path): tuple(leaf.shape)
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree)
  }
