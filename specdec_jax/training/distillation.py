"""Drafters that learn from their target: DistillSpec, and the text it needs.

DistillSpec (Zhou et al., arXiv 2310.08461) minimises a divergence between the
laws of target and drafter over a text: the data set's own, one that the target
wrote, or one that the drafter wrote. Text of the target with plain cross
entropy is sequence-level distillation (Kim and Rush, arXiv 1606.07947).
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from specdec_jax import base, logits
from specdec_jax.base import Array
from specdec_jax.data import batching, token_files
from specdec_jax.data.token_files import TokenFile
from specdec_jax.decoding import autoregressive
from specdec_jax.models import adapters
from specdec_jax.models.t5 import T5Config
from specdec_jax.training import losses
from specdec_jax.training.losses import LossSums
from specdec_jax.training.train_step import Batch, LossFn, teacher_forced_logits

# Widths of the encoder's buffer are multiples of this.
_WIDTH = 16


def distillation_loss(
  config: T5Config,
  *,
  target_config: T5Config,
  target_params: Any,
  kind: str = 'forward_kl',
  beta: float = 0.5,
) -> LossFn:
  """The divergence of drafter and target at the positions of a text.

  What it reports as correct is where the two have the same likeliest token:
  the chance that a greedy draft is accepted there.

  Args:
    config: of the drafter.
    target_config: of the target, with the same vocabulary.
    target_params: its parameters, which do not change.
    kind: see `losses.divergence`.
    beta: see `losses.divergence`.

  Raises:
    ValueError: if the vocabularies have different sizes.
  """
  if config.vocab_size != target_config.vocab_size:
    raise ValueError(
      f'the drafter has {config.vocab_size} tokens, its target '
      f'{target_config.vocab_size}'
    )

  def loss_fn(params, batch: Batch, dropout_key: Array | None) -> LossSums:
    key = dropout_key if config.dropout_rate else None
    draft = teacher_forced_logits(config, params, batch, key)
    target = jax.lax.stop_gradient(
      teacher_forced_logits(target_config, target_params, batch)
    )
    weights = batch['decoder_loss_weights']
    distance = losses.divergence(target, draft, kind=kind, beta=beta)
    sums = losses.cross_entropy(draft, batch['decoder_target_tokens'], weights)
    agrees = (draft.argmax(-1) == target.argmax(-1)).astype(jnp.float32)
    return sums.replace(
      loss=(distance * weights).sum(), num_correct=(agrees * weights).sum()
    )

  return loss_fn


def rewrite_targets(
  config: T5Config,
  params: Any,
  tokens: TokenFile,
  *,
  max_new_tokens: int,
  eos_id: int,
  temperature: float = 0.0,
  batch_size: int = 64,
  seed: int = 0,
  report: Callable[[int], None] = lambda num_examples: None,
) -> TokenFile:
  """The same inputs with the targets that a model gives them.

  Args:
    config: of the model, an encoder-decoder.
    params: its parameters.
    tokens: inputs; their targets are not read.
    max_new_tokens: of a target; one without an end by then stays without.
    eos_id: ends a target.
    temperature: 0 is greedy.
    batch_size: rows decoded at once, of inputs of similar lengths.
    seed: of the draws: example i depends on it and on i alone.
    report: told after every batch how many examples it had.

  Raises:
    ValueError: if there are no inputs.
  """
  if tokens.inputs is None or tokens.input_offsets is None:
    raise ValueError('these examples have no inputs to decode')
  generate = jax.jit(
    functools.partial(
      autoregressive.generate,
      target=adapters.t5(config),
      logits_to_probs=logits.standardize(temperature=temperature),
      max_len=max_new_tokens + 1,
      eos_id=eos_id,
    )
  )
  order = np.argsort(np.diff(tokens.input_offsets), kind='stable')
  written: dict[int, np.ndarray] = {}
  for first in range(0, len(tokens), batch_size):
    chosen = order[first : first + batch_size]
    # Rows beyond the last example repeat it, so that one program serves all.
    padded = np.pad(chosen, (0, batch_size - len(chosen)), mode='edge')
    sources = [tokens.example(i)[0] for i in padded]
    width = -(-max(len(source) for source in sources) // _WIDTH) * _WIDTH
    encoder_tokens, _ = batching.pack(sources, width=width)
    prompt = base.Prompt(
      encoder_tokens=jnp.asarray(encoder_tokens),
      decoder_tokens=jnp.zeros((batch_size, 1), jnp.int32),
      decoder_lengths=jnp.ones(batch_size, jnp.int32),
      row_ids=jnp.asarray(padded, jnp.int32),
    )
    output = generate(base.Params(params), jax.random.key(seed), prompt)
    rows, lengths = np.asarray(output.tokens), np.asarray(output.lengths)
    for row, i in enumerate(chosen):
      written[int(i)] = rows[row, 1 : lengths[row]]
    report(len(chosen))
  flat = token_files.from_rows(None, [written[i] for i in range(len(tokens))])
  return TokenFile(
    inputs=tokens.inputs,
    input_offsets=tokens.input_offsets,
    targets=flat.targets,
    target_offsets=flat.target_offsets,
  )
