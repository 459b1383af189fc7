"""Functions that gin binds to distil a drafter; see `gin_configs/runs/`."""

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from specdec_jax import base
from specdec_jax.base import Array
from specdec_jax.checkpoints import loading
from specdec_jax.decoding import autoregressive
from specdec_jax.decoding.method import Method
from specdec_jax.files import replacing
from specdec_jax.files.paths import user_path
from specdec_jax.launch import agreement
from specdec_jax.models import families
from specdec_jax.models.t5 import T5Config
from specdec_jax.sampling import logits
from specdec_jax.sharding import mesh as meshes
from specdec_jax.text import prompts
from specdec_jax.training import losses
from specdec_jax.training.data import datasets, token_files
from specdec_jax.training.data.datasets import Dataset
from specdec_jax.training.data.token_files import TokenFile
from specdec_jax.training.losses import ArrayTree, Batch, LossFn, LossSums

# Widths of the encoder's buffer are multiples of this.
_WIDTH = 16


def distillation_loss(
  config: T5Config,
  *,
  target: str,
  kind: str = 'forward_kl',
  beta: float = 0.5,
) -> LossFn:
  """Returns a loss: the divergence of drafter and target along a text.

  DistillSpec (Zhou et al., arXiv 2310.08461) minimises it over texts of the
  data set, of the target or of the drafter. Its accuracy is the share of
  positions where both have the same likeliest token.

  The target is a model, as `--model` takes it, in the dtype of the drafter's
  activations; its parameters do not change. `losses.divergence` explains `kind`
  and `beta`. ValueError if the vocabularies differ in size.
  """
  target_config, target_params = read_t5(target, config.dtype)
  if config.vocab_size != target_config.vocab_size:
    raise ValueError(
      f'the drafter has {config.vocab_size} tokens, its target '
      f'{target_config.vocab_size}'
    )

  def loss_fn(params, batch: Batch, dropout_key: Array | None) -> LossSums:
    key = dropout_key if config.dropout_rate else None
    draft = losses.teacher_forced(config, params, batch, key)
    # The target's parameters are constants, and its logits take no gradient.
    target = jax.lax.stop_gradient(
      losses.teacher_forced(target_config, target_params, batch)
    )
    weights = batch['decoder_loss_weights']
    distance = losses.divergence(target, draft, kind=kind, beta=beta)
    sums = losses.cross_entropy(draft, batch['decoder_target_tokens'], weights)
    # Where they agree a greedy draft is accepted.
    agrees = (draft.argmax(-1) == target.argmax(-1)).astype(jnp.float32)
    return dataclasses.replace(
      sums,
      loss=(distance * weights).sum(),
      num_correct=(agrees * weights).sum(),
    )

  return loss_fn


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rewriting:
  """The settings with which a model writes targets.

  Attributes:
    max_new_tokens: the maximum length; longer targets are cut, without EOS.
    eos_id: the id of EOS.
    vocab_size: ids from this one on are padding, and never written.
    temperature: 0 is greedy.
    batch_size: rows decoded at once, of inputs of similar lengths.
  """

  max_new_tokens: int
  eos_id: int
  vocab_size: int
  temperature: float = 0.0
  batch_size: int = 64


def rewrite_targets(
  config: T5Config,
  params: ArrayTree,
  tokens: TokenFile,
  rewriting: Rewriting,
  *,
  seed: int = 0,
  report: Callable[[int], None] = lambda num_examples: None,
) -> TokenFile:
  """Replaces targets by those that an encoder-decoder writes for the inputs.

  To train a drafter on them with cross entropy is sequence-level distillation
  (Kim and Rush, arXiv 1606.07947). Example i depends on the seed and on i, not
  on its batch. `report` is called with the size of every batch. Raises
  ValueError without inputs or an encoder, or for NaN logits.
  """
  if tokens.inputs is None:
    raise ValueError('these examples have no inputs to decode')
  if not families.has_encoder(config):
    raise ValueError('this model has no encoder: use specdec data write')
  batch_size = rewriting.batch_size
  generate = _generate_fn(config, rewriting)
  params = jax.tree.map(lambda x: x.astype(config.dtype), params)
  # Inputs of similar lengths share a batch, to save padding.
  order = np.argsort(tokens.inputs.lengths, kind='stable')
  written: dict[int, np.ndarray] = {}
  for first in range(0, len(tokens), batch_size):
    chosen = order[first : first + batch_size]
    # Rows beyond the last example repeat it, so that one program serves all.
    padded = np.pad(chosen, (0, batch_size - len(chosen)), mode='edge')
    sources = [tokens.inputs[i].tolist() for i in padded]
    prompt = prompts.pack(
      sources,
      config=config,
      max_new_tokens=rewriting.max_new_tokens,
      width=-(-max(map(len, sources)) // _WIDTH) * _WIDTH,
      row_ids=padded.tolist(),
    )
    output = generate(base.Params(params), jax.random.key(seed), prompt)
    if output.has_nan.any():
      raise ValueError('the logits of the model are NaN')
    rows, lengths = meshes.fetch((output.tokens, output.lengths))
    for row, i in enumerate(chosen):
      written[int(i)] = rows[row, 1 : lengths[row]]
    report(len(chosen))
  targets = [written[i] for i in range(len(tokens))]
  return dataclasses.replace(tokens, targets=token_files.texts(targets))


@functools.lru_cache(maxsize=8)
def _generate_fn(config: T5Config, rewriting: Rewriting) -> Callable:
  """Returns plain decoding, compiled once for all texts."""
  generate = functools.partial(
    autoregressive.generate,
    method=Method(
      target=families.language_model(config),
      logits_to_probs=logits.standardize(
        temperature=rewriting.temperature, vocab_size=rewriting.vocab_size
      ),
      eos_id=rewriting.eos_id,
    ),
    max_len=rewriting.max_new_tokens + 1,
  )
  return jax.jit(generate)


def drafter_texts(
  *,
  config: T5Config,
  tokens: str | Sequence[str],
  folder: str,
  batch_size: int,
  lengths: Mapping[str, int],
  num_examples: int,
  refresh_period: int,
  temperature: float = 1.0,
  seed: int = 0,
) -> Dataset:
  """Returns batches of text that the drafter itself wrote recently.

  DistillSpec samples new text at every step; here the drafter writes
  `num_examples` targets every `refresh_period` steps, in large batches. The
  inputs are taken in turn from `tokens`, shuffled: one or several folders of
  `specdec data prepare` with one vocabulary. Texts are stored in the run's
  `folder`, and read again if the run is resumed.
  """
  names = [tokens] if isinstance(tokens, str) else tokens
  folders = [user_path(name) for name in names]
  files = [token_files.load(path / 'train.npz') for path in folders]
  inputs = token_files.concatenate(files)
  how = rewriting(folders[0], lengths['targets'], temperature)
  order = np.random.Generator(np.random.Philox(seed)).permutation(len(inputs))
  digest = agreement.of_arrays([*map(vars, inputs.features.values())])
  settings = repr((digest, how, num_examples, refresh_period, seed))
  mark = agreement.of_settings({'': settings})[:8]
  current: dict[int, Dataset] = {}  # The data set of the current text.

  def prepare(position: int, params: ArrayTree) -> None:
    text = position // refresh_period
    if text in current:
      return
    path = user_path(folder) / f'drafter_text_{text}_{mark}.npz'
    if not path.is_file():
      # Text 1 of 64 examples each has inputs 64 to 127 of an endless order.
      first = text * num_examples
      chosen = order[np.arange(first, first + num_examples) % len(order)]
      some = token_files.take(inputs, chosen)
      written = rewrite_targets(config, params, some, how, seed=seed + text)
      with replacing.file(path) as partial:
        token_files.save(partial, written)
    current.clear()
    current[text] = datasets.from_tokens(
      [token_files.load(path)],
      batch_size=batch_size,
      lengths=lengths,
      seed=seed,
    )

  return Dataset(
    batch=lambda position: current[position // refresh_period].batch(position),
    prepare=prepare,
    vocabulary=token_files.find_vocabulary(folders),
    contents=[vars(texts) for texts in inputs.features.values()],
  )


def rewriting(
  folder: Path, length: int, temperature: float, batch_size: int = 64
) -> Rewriting:
  """Returns the settings for targets of up to `length` tokens, with the
  vocabulary of a folder of token files."""
  vocabulary = token_files.load_description(folder).at('vocabulary')
  return Rewriting(
    max_new_tokens=length,
    eos_id=vocabulary.count('eos_id', least=0),
    vocab_size=vocabulary.count('size'),
    temperature=temperature,
    batch_size=batch_size,
  )


def read_t5(name: str, dtype: DTypeLike) -> tuple[T5Config, ArrayTree]:
  """Reads config and parameters of a T5; ValueError for another model."""
  config, params = loading.read(loading.locate(name), dtype=jnp.dtype(dtype))
  if not isinstance(config, T5Config):
    raise ValueError(f'{name} is not a T5')
  return config, params
