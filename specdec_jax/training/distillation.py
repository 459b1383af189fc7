"""Drafters that learn from their target: DistillSpec, and the text it needs.

DistillSpec (Zhou et al., arXiv 2310.08461) minimises a divergence between the
distributions of target and drafter over a text: that of the data set, one
written by the target, or one written by the drafter. Text of the target with
plain cross entropy is sequence-level distillation (Kim and Rush, arXiv
1606.07947).
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from specdec_jax import base, logits
from specdec_jax.base import Array
from specdec_jax.data import token_files, training_batches
from specdec_jax.data.datasets import Dataset
from specdec_jax.data.token_files import TokenFile
from specdec_jax.decoding import autoregressive
from specdec_jax.files import replacing
from specdec_jax.models import families
from specdec_jax.models.t5 import T5Config
from specdec_jax.sharding import mesh as meshes
from specdec_jax.text import prompts
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
  the probability that a greedy draft is accepted there.

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
    return dataclasses.replace(
      sums,
      loss=(distance * weights).sum(),
      num_correct=(agrees * weights).sum(),
    )

  return loss_fn


def rewrite_targets(
  config: T5Config,
  params: Any,
  tokens: TokenFile,
  *,
  max_new_tokens: int,
  eos_id: int,
  vocab_size: int,
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
    vocab_size: ids at or beyond it are padding, and never written.
    temperature: 0 is greedy.
    batch_size: rows decoded at once, of inputs of similar lengths.
    seed: of the draws: example i depends on it and on i alone.
    report: told after every batch how many examples it had.

  Raises:
    ValueError: if there are no inputs, the batch has no rows, or the model's
      logits are NaN.
  """
  if batch_size < 1:
    raise ValueError(f'batch_size must be at least 1, got {batch_size}')
  if tokens.inputs is None or tokens.input_offsets is None:
    raise ValueError('these examples have no inputs to decode')
  generate = _generate_fn(
    config, max_new_tokens + 1, eos_id, temperature, vocab_size
  )
  params = jax.tree.map(lambda x: x.astype(config.dtype), params)
  order = np.argsort(np.diff(tokens.input_offsets), kind='stable')
  written: dict[int, Any] = {}
  for first in range(0, len(tokens), batch_size):
    chosen = order[first : first + batch_size]
    # Rows beyond the last example repeat it, so that one program serves all.
    padded = np.pad(chosen, (0, batch_size - len(chosen)), mode='edge')
    sources: list[Any] = [tokens.example(i)[0] for i in padded]
    width = -(-max(len(source) for source in sources) // _WIDTH) * _WIDTH
    prompt = prompts.pack(
      sources,
      config=config,
      max_new_tokens=max_new_tokens,
      width=width,
      row_ids=padded.tolist(),
    )
    output = generate(base.Params(params), jax.random.key(seed), prompt)
    if output.has_nan.any():
      raise ValueError('the logits of the model are NaN')
    rows, lengths = meshes.fetch((output.tokens, output.lengths))
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


@functools.lru_cache(maxsize=8)
def _generate_fn(
  config: T5Config,
  max_len: int,
  eos_id: int,
  temperature: float,
  vocab_size: int,
) -> Callable:
  """Plain decoding, compiled once for all texts."""
  return jax.jit(
    functools.partial(
      autoregressive.generate,
      target=families.language_model(config),
      logits_to_probs=logits.standardize(
        temperature=temperature, vocab_size=vocab_size
      ),
      max_len=max_len,
      eos_id=eos_id,
    )
  )


def drafter_texts(
  config: T5Config,
  tokens: TokenFile,
  *,
  folder: str,
  batch_size: int,
  lengths: Mapping[str, int],
  eos_id: int,
  vocab_size: int,
  num_examples: int,
  refresh_period: int,
  temperature: float = 1.0,
  seed: int = 0,
) -> Dataset:
  """Batches of text that the drafter itself wrote a short while ago.

  DistillSpec draws new text at every step; here the drafter writes
  `num_examples` targets every `refresh_period` steps, in large batches, and
  they are read meanwhile. Each of these texts is kept in `folder`, so that a
  run that is resumed reads what it would have read.

  Args:
    config: of the drafter.
    tokens: whose inputs are given to it.
    folder: for the texts.
    batch_size: rows of a batch.
    lengths: columns of the rows, as `inputs` and `targets`.
    eos_id: ends a target.
    vocab_size: ids at or beyond it are padding, and never written.
    num_examples: of a text, the next of the shuffled inputs each time.
    refresh_period: batches from one text to the next.
    temperature: of the draws; DistillSpec's is 1.
    seed: of the order of inputs and of the draws.
  """
  order = np.random.Generator(np.random.Philox(seed)).permutation(len(tokens))
  current: dict[int, training_batches.Rows] = {}

  def prepare(position: int, params: Any) -> None:
    text = position // refresh_period
    if text in current:
      return
    path = Path(folder) / f'drafter_text_{text}.npz'
    if not path.is_file():
      path.parent.mkdir(parents=True, exist_ok=True)
      first = text * num_examples
      chosen = order[np.arange(first, first + num_examples) % len(order)]
      written = rewrite_targets(
        config,
        params,
        token_files.take(tokens, chosen),
        max_new_tokens=lengths['targets'],
        eos_id=eos_id,
        vocab_size=vocab_size,
        temperature=temperature,
        seed=seed + text,
      )
      with replacing.file(path) as partial:
        token_files.save(partial, written)
    current.clear()
    current[text] = training_batches.pack(
      token_files.load(path),
      input_length=lengths['inputs'],
      target_length=lengths['targets'],
      seed=seed,
    )

  def batch(position: int) -> training_batches.Rows:
    return training_batches.batch(
      current[position // refresh_period],
      position,
      batch_size=batch_size,
      seed=seed,
    )

  return Dataset(batch=batch, prepare=prepare)
