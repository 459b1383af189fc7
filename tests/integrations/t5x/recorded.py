"""The door of T5X, for the record of what the package does."""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import gin
import jax
import jax.numpy as jnp
import numpy as np

from specdec_jax.integrations import t5x
from tests.recorded import checkpoints
from tests.recorded.cases import MAX_INPUT_TOKENS, NUM_NEW, TEXTS, Case
from tests.recorded.doors import Record, exact, options_of


@dataclasses.dataclass(frozen=True)
class T5XSizes:
  """The fields of `t5x.examples.t5.network.T5Config`."""

  vocab_size: int
  emb_dim: int
  num_heads: int
  num_encoder_layers: int
  num_decoder_layers: int
  head_dim: int
  mlp_dim: int
  mlp_activations: tuple[str, ...]
  dtype: str = 'float32'
  dropout_rate: float = 0.0
  logits_via_embedding: bool = False
  float32_attention_logits: bool = False


@dataclasses.dataclass(frozen=True)
class T5XNetwork:
  """What stands for `t5x.examples.t5.network.Transformer`."""

  config: T5XSizes
  scan_layers: bool = False


class T5XVocabulary:
  """What stands for a vocabulary of SeqIO."""

  eos_id = checkpoints.EOS
  vocab_size = checkpoints.VOCAB_SIZE


class T5XModel:
  """What stands for `t5x.models.EncoderDecoderModel` where a `decode_fn` sees
  it."""

  def __init__(self, sizes: T5XSizes):
    self.module = T5XNetwork(sizes)
    self.output_vocabulary = T5XVocabulary()

  def _compute_logits_from_slice(
    self, state, params, encoded_inputs, raw_inputs, max_decode_length
  ):
    raise AssertionError('a step by one token is never taken')

  def tokens_to_logits(
    self, params: Any, inputs: jax.Array
  ) -> Callable[..., Any]:
    """Returns the function that T5X passes to a `decode_fn`."""
    return functools.partial(
      self._compute_logits_from_slice,
      params=params,
      encoded_inputs=None,
      raw_inputs=inputs,
      max_decode_length=NUM_NEW,
    )


def _encoded(folder: Path, texts: Sequence[str]) -> np.ndarray:
  """Returns the tokens of texts, int32 `[B, MAX_INPUT_TOKENS]`, 0 behind."""
  tokenizer = checkpoints.read_tokenizer(folder / 'target')
  tokens = np.zeros((len(texts), MAX_INPUT_TOKENS), np.int32)
  for row, text in zip(tokens, texts, strict=True):
    ids = tokenizer.encode(text).ids
    row[: len(ids)] = ids
  return tokens


def t5x_plugin(folder: Path, case: Case) -> list[Record]:
  """T5X's `decode_fn` under gin, on stand-ins for T5X's objects: tokens, and
  the scores of rows."""
  # Only T5X's own vocabulary knows which ids are padding.
  num_tokens = checkpoints.read_tokenizer(folder / 'target').get_vocab_size()
  padding = range(num_tokens, checkpoints.VOCAB_SIZE)
  suppressed = [*case.logits.get('suppress_tokens', ()), *padding]
  options = {
    'drafter': case.drafter,
    'temperature': case.temperature,
    **options_of(folder, case),
    **case.logits,
    'suppress_tokens': suppressed,
  }
  gin.clear_config(clear_constants=True)
  gin.parse_config(
    [
      'from __gin__ import dynamic_registration',
      'from specdec_jax.integrations import t5x',
      *(f't5x.speculative_decode.{n} = {x!r}' for n, x in options.items()),
    ]
  )
  decode_fn = gin.get_configurable(t5x.speculative_decode)
  fields = {field.name for field in dataclasses.fields(T5XSizes)}
  sizes = checkpoints.T5_SIZES
  shared = {name: x for name, x in sizes.items() if name in fields}
  activations = tuple(sizes['mlp_activations'])
  shared |= {'emb_dim': sizes['embed_dim'], 'mlp_activations': activations}
  model = T5XModel(T5XSizes(**shared))

  @jax.jit
  def decode(params: Any, inputs: jax.Array) -> tuple[jax.Array, jax.Array]:
    return decode_fn(
      jnp.zeros((len(TEXTS), NUM_NEW), jnp.int32),
      cache={},
      tokens_to_logits=model.tokens_to_logits(params, inputs),
      eos_id=checkpoints.EOS,
    )

  inputs = jnp.asarray(_encoded(folder, TEXTS))
  tokens, scores = decode(checkpoints.t5_params(), inputs)
  gin.clear_config(clear_constants=True)
  return [
    {'tokens': row.tolist(), 'scores': exact(score.tolist())}
    for row, score in zip(np.asarray(tokens), np.asarray(scores), strict=True)
  ]
