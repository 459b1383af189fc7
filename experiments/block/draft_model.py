"""Trains a small draft model for a Llama-type target, on texts that it wrote.

    python -m experiments.block.draft_model --target=smollm2-135m \
      --texts=texts/smollm2 --steps=400 --model_dir=runs/draft_model

`specdec train` makes models with a SentencePiece vocabulary; this one has the
tokenizer of its target. It begins with the target's embeddings, projected to
its width, and random layers, and learns the target's distributions from the
streams in the texts, by the loss of the drafters on features.
"""

import argparse
import dataclasses
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from experiments import common
from experiments.block import training
from specdec_jax.base import Array, Placement, Prompt
from specdec_jax.checkpoints import loading, safetensors_model
from specdec_jax.models import families
from specdec_jax.models.drafting.draft_vocabulary import with_logits_of
from specdec_jax.models.llama import LlamaConfig
from specdec_jax.text import vocabulary_files
from specdec_jax.training import block_states, eagle, loop, optimizers
from specdec_jax.training import metrics_log as log
from specdec_jax.training.data import written_texts
from specdec_jax.training.losses import ArrayTree, Batch, LossFn, LossSums


def main(argv: Sequence[str] | None = None) -> int:
  parser = argparse.ArgumentParser(
    prog='python -m experiments.block.draft_model'
  )
  add = parser.add_argument
  add('--target', required=True)
  add('--texts', required=True, help='of specdec data write, with streams')
  add('--model_dir', type=Path, required=True)
  add('--learning_rate', type=float, default=0.002)
  common.add_counts(
    parser,
    steps=400,
    embed_dim=192,
    num_layers=2,
    mlp_dim=512,
    draft_vocab_size=7424,
    batch_size=2,
  )
  args = parser.parse_args(argv)
  return common.finish('draft_model', lambda: _train(args))


def _train(args: argparse.Namespace) -> None:
  target_config, target_params = eagle.read_target(args.target, jnp.bfloat16)
  config = sizes(
    target_config,
    embed_dim=args.embed_dim,
    num_layers=args.num_layers,
    mlp_dim=args.mlp_dim,
  )
  head = eagle.head_of(target_config, target_params)
  counts = written_texts.token_counts(args.texts, config.vocab_size)
  ids, _ = written_texts.most_frequent(counts, args.draft_vocab_size)
  schedule = loop.Schedule(
    train_steps=args.steps,
    eval_period=args.steps,
    checkpoint_period=training.checkpoint_period(args.steps),
    keep=training.NUM_AVERAGED,
    average_last=training.NUM_AVERAGED,
  )
  rate = optimizers.learning_rate(
    training.SCHEDULE,
    base_learning_rate=args.learning_rate,
    warmup_steps=training.WARMUP_STEPS,
  )
  with log.open_log(args.model_dir, step=0) as write:
    params = loop.train(
      config=config,
      dataset=written_texts.from_written_texts(
        args.texts, batch_size=args.batch_size, max_validation_rows=32
      ),
      optimizer=optimizers.adamw(rate, b2=0.95, eps=1e-8, max_grad_norm=0.5),
      loss_fn=draft_loss(config, head, ids, target_config.norm_epsilon),
      model_dir=args.model_dir,
      schedule=schedule,
      initial_params=initial_params(config, jax.random.key(0), head.embedding),
      report=_Means(write),
    )
  folder = args.model_dir / 'model'
  safetensors_model.save(
    folder, dataclasses.replace(config, dtype=jnp.dtype('float32')), params
  )
  vocabulary = loading.read_vocabulary(loading.locate(args.target))
  vocabulary_files.write(folder, vocabulary)
  listed = json.dumps({'ids': ids.tolist()})
  (folder / 'draft_vocabulary.json').write_text(listed, 'utf-8')


def sizes(
  target: LlamaConfig, *, embed_dim: int, num_layers: int, mlp_dim: int
) -> LlamaConfig:
  """Returns the sizes of a draft model: the target's, but for these."""
  num_heads = embed_dim // target.head_dim
  return LlamaConfig(
    vocab_size=target.vocab_size,
    embed_dim=embed_dim,
    num_layers=num_layers,
    num_heads=num_heads,
    num_kv_heads=num_heads,
    head_dim=target.head_dim,
    mlp_dim=mlp_dim,
    rope_base=target.rope_base,
    norm_epsilon=target.norm_epsilon,
    max_positions=target.max_positions,
    is_tied=True,
    dtype=jnp.dtype('bfloat16'),
  )


def initial_params(
  config: LlamaConfig, rng_key: Array, embedding: Array
) -> ArrayTree:
  """Returns random parameters, but for the embeddings: those of the target,
  `[V, target_embed]`, along their principal directions."""
  rows = embedding.astype(jnp.float32)
  _, directions = jnp.linalg.eigh(rows.T @ rows)  # The largest come last.
  params = families.init_params(config, rng_key)
  rows = rows @ directions[:, -config.embed_dim :]
  # Tied logits of a normed state have then the spread of the target's inputs.
  rows = rows / (jnp.std(rows) * config.embed_dim**0.5)
  return params | {'token_embedder': {'embedding': rows}}


def draft_loss(
  config: LlamaConfig, head: eagle.TargetHead, ids: np.ndarray, epsilon: float
) -> LossFn:
  """Returns a loss: `eagle.lk_loss` per token that the target wrote, over the
  tokens `ids`, the only ones that are drafted."""
  model = families.language_model(config)
  target_ids = jnp.asarray(ids, jnp.int32)

  def loss_fn(params: ArrayTree, batch: Batch, key: Array | None) -> LossSums:
    del key
    states = block_states.from_streams(head, target_ids, batch, epsilon=epsilon)
    batch = block_states.read_by_target(batch)
    tokens, segments = (
      batch['decoder_input_tokens'],
      batch['decoder_segment_ids'],
    )
    ones = jnp.ones(len(tokens), jnp.int32)
    prompt = Prompt(
      encoder_tokens=None,
      decoder_tokens=tokens[:, :1],
      decoder_lengths=ones,
      row_ids=ones,
    )
    cache = model.init(params, prompt, tokens.shape[1])
    rounded = jax.tree.map(lambda x: x.astype(config.dtype), params)
    few = with_logits_of(rounded, ids, is_tied=True)
    logits, _ = model.extend(
      few, tokens, cache, placement=_within_texts(segments)
    )
    loss, kl, alpha = eagle.lk_loss(states.log_probs, logits)
    counted = batch['decoder_loss_weights']
    weight = counted.sum()
    likeliest = jnp.take(target_ids, logits.argmax(-1))
    is_correct = likeliest == batch['decoder_target_tokens']
    return LossSums(
      loss=(loss * counted).sum(),
      nats=(kl * counted).sum(),
      num_correct=(is_correct * counted).sum(),
      weight=weight,
      figures={'alpha': jnp.stack(((alpha * counted).sum(), weight))},
    )

  return loss_fn


def _within_texts(segments: Array) -> Placement:
  """Places packed tokens, `[B, T]`: each sees those of its own text up to
  itself."""
  places = jnp.arange(segments.shape[1], dtype=jnp.int32)[None]
  mask = segments[:, :, None] == segments[:, None, :]
  mask &= places[..., None] >= places[:, None, :]
  positions = jnp.broadcast_to(places, segments.shape)
  # Rotary positions are relative: those of the row do.
  return Placement(positions=positions, key_positions=places, mask=mask)


class _Means:
  """Writes the means of some steps, as `specdec train` does."""

  def __init__(self, write: loop.Report):
    self.write = write
    self.since: list[Mapping[str, float]] = []

  def __call__(self, step: int, metrics: Mapping[str, float]) -> None:
    if 'loss' not in metrics:
      self.write(step, metrics)
      return
    self.since.append(metrics)
    if step % training.LOG_PERIOD:
      return
    total = lambda name: sum(row[name] for row in self.since)
    weight = total('weight')
    shown: dict[str, Any] = {
      name: sum(row[name] * row['weight'] for row in self.since) / weight
      for name in ('loss', 'nats', 'accuracy', 'alpha')
    }
    shown['targets'] = weight
    shown['targets_per_processor_second'] = weight / total('processor_seconds')
    self.since.clear()
    self.write(step, shown)
    print(step, shown, file=sys.stderr, flush=True)


if __name__ == '__main__':
  sys.exit(main())
