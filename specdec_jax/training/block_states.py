"""What a block drafter learns of its target: the target's states along texts.

The target reads each text once and leaves what decoding would find in its
cache; or the states were stored with the text when the target wrote it.
"""

from typing import Any

import jax
import jax.numpy as jnp

from specdec_jax import base
from specdec_jax.base import Array, Prompt
from specdec_jax.models import taps
from specdec_jax.models.drafting.block_layers import BlockDrafterConfig
from specdec_jax.models.kv_cache import Cross
from specdec_jax.models.networks import Network
from specdec_jax.training import eagle
from specdec_jax.training.eagle import TargetHead, ahead
from specdec_jax.training.losses import ArrayTree, Batch


@base.value
class TargetStates:
  """The states of a target that has read texts of T tokens.

  Attributes:
    features: `[B, T, F]`, the streams that the drafter reads.
    log_probs: float32 `[B, T, V_draft]`, of the token after each.
    crosses: keys, values and mask of the source, for each layer that reads it.
  """

  features: Array
  log_probs: Array
  crosses: list[Cross]


def of_batch(
  name: str,
  target: Network,
  params: ArrayTree,
  config: BlockDrafterConfig,
  ids: Array,
  batch: Batch,
) -> tuple[TargetStates, Batch]:
  """Returns the states along the texts of a batch, and the texts as the target
  reads them. Without streams in the batch, the target runs.

  ValueError for streams of a target, called `name`, that is no Llama-type
  decoder; other arguments are those of `target_states`.
  """
  if 'streams' not in batch:
    return target_states(target, params, config, ids, batch), batch
  eagle.check_target(name, target.config)
  head = eagle.head_of(target.config, params)
  epsilon = target.config.norm_epsilon
  states = from_streams(head, ids, batch, epsilon=epsilon)
  return states, read_by_target(batch)


def target_states(
  target: Network,
  params: ArrayTree,
  config: BlockDrafterConfig,
  ids: Array,
  batch: Batch,
) -> TargetStates:
  """Reads the texts of a batch, one in each row, as a prefill of decoding does;
  `ids` are the tokens that can be drafted."""
  tokens = batch['decoder_input_tokens']
  batch_size, length = tokens.shape
  # A prefill reads all but the last column.
  prompt = Prompt(
    encoder_tokens=batch.get('encoder_input_tokens'),
    decoder_tokens=jnp.pad(tokens, ((0, 0), (0, 1))),
    decoder_lengths=jnp.full(batch_size, length + 1, jnp.int32),
    row_ids=jnp.arange(batch_size, dtype=jnp.int32),
  )
  chosen = *config.feature_layers, taps.LAST
  model = taps.last_call(target, chosen, width=1)
  cache: Any = model.init(params, prompt, length + 1)
  features, last = jnp.split(
    cache.prompt, [len(config.feature_layers) * config.embed_dim], axis=-1
  )
  logits = target.project(params, last)
  normalizer = jax.nn.logsumexp(logits, axis=-1, keepdims=True)
  sources = cache.target.crosses
  states = TargetStates(
    features=features,
    log_probs=jnp.take(logits, ids, axis=-1) - normalizer,
    crosses=[sources[layer] for layer in config.cross_layers],
  )
  constant: TargetStates = jax.lax.stop_gradient(states)
  return constant


def from_streams(
  head: TargetHead, ids: Array, batch: Batch, *, epsilon: float
) -> TargetStates:
  """Takes the states from a batch of `written_texts`, whose last stream is the
  target's output; `ids` are the tokens that can be drafted, `epsilon` is of the
  target's last norm."""
  begin = batch['streams'].shape[-1] - head.norm.size
  features, last = jnp.split(batch['streams'], [begin], axis=-1)
  x, normalizer = eagle.target_states(head, last, batch, epsilon=epsilon)
  rows = jnp.take(head.rows, ids, axis=0)
  log_probs = eagle.target_log_probs(rows, x, normalizer)
  return TargetStates(features=features, log_probs=log_probs, crosses=[])


def read_by_target(batch: Batch) -> Batch:
  """Returns written texts as a decoder reads them, as token files have them:
  the tokens of the texts as inputs, and those that follow as targets."""
  tokens = batch['decoder_target_tokens']
  segments = batch['decoder_segment_ids']
  # Of texts [a, b, c] and [d, e] in a row, the weights are [1, 1, 0, 1, 0].
  goes_on = ahead(segments, 1) == segments
  weights = jnp.where(goes_on, ahead(batch['decoder_loss_weights'], 1), 0.0)
  return {
    'decoder_input_tokens': tokens,
    'decoder_target_tokens': ahead(tokens, 1),
    'decoder_loss_weights': weights,
    'decoder_segment_ids': segments,
  }
