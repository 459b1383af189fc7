"""A tiny network, and a task that it can learn: to copy, one letter up."""

import functools
import io
import json
from pathlib import Path

import numpy as np

from specdec_jax.models.t5 import T5Config
from specdec_jax.training.data import datasets, token_files, training_batches
from specdec_jax.training.data.datasets import Dataset
from specdec_jax.training.data.training_batches import Group

CONFIG = T5Config(
  vocab_size=16,
  embed_dim=32,
  num_encoder_layers=1,
  num_decoder_layers=1,
  num_heads=2,
  head_dim=16,
  mlp_dim=64,
)
LENGTHS = {'inputs': 16, 'targets': 16}
EOS = 1


def examples(count: int, *, seed: int = 0) -> token_files.TokenFile:
  """Inputs of 1 to 5 letters; each target is the next letter of each."""
  generator = np.random.default_rng(seed)
  inputs, targets = [], []
  for _ in range(count):
    letters = generator.integers(3, 15, generator.integers(1, 6))
    inputs.append([*letters.tolist(), EOS])
    targets.append([*(letters + 1).tolist(), EOS])
  return token_files.from_rows(inputs, targets)


@functools.cache
def vocabulary(letters: str = 'abcdefghijkl') -> bytes:
  """A SentencePiece model of 16 ids: three special ones, 12 letters, blank."""
  import sentencepiece

  model = io.BytesIO()
  sentencepiece.SentencePieceTrainer.train(
    sentence_iterator=iter([letters]),
    model_writer=model,
    model_type='char',
    vocab_size=CONFIG.vocab_size,
    pad_id=0,
    eos_id=EOS,
    unk_id=2,
    bos_id=-1,
    minloglevel=2,
  )
  return model.getvalue()


def write_tokens(folder: Path, **counts: int) -> None:
  """What `specdec data prepare` writes, of so many examples per split."""
  folder.mkdir()
  (folder / token_files.VOCABULARY).write_bytes(vocabulary())
  for split, count in counts.items():
    token_files.save(folder / f'{split}.npz', examples(count))
  description = {
    'vocabulary': {
      'sha256': token_files.sha256_of(vocabulary()),
      'size': CONFIG.vocab_size,
      'eos_id': EOS,
    },
    'lengths': LENGTHS,
    'splits': {split: {} for split in counts},
  }
  (folder / 'tokens.json').write_text(json.dumps(description))


def rows(count: int, *, max_examples: int | None = None):
  return training_batches.pack(
    examples(count),
    input_length=LENGTHS['inputs'],
    target_length=LENGTHS['targets'],
    max_examples=max_examples,
  )


def dataset(*, batch_size: int = 16, count: int = 400) -> Dataset:
  packed = rows(count)
  first = {name: x[:batch_size] for name, x in packed.items()}
  group, held_out = (Group(each, batch_size) for each in (packed, first))
  return datasets.of_groups([group], [held_out])
