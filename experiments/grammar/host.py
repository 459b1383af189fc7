"""The time that the host needs for the masks of an iteration."""

import dataclasses
import itertools
import json
import statistics
import time
from collections.abc import Sequence

import numpy as np
import tokenizers

import specdec_jax
from experiments.grammar import people
from experiments.report import Cells, Table
from specdec_jax.base import Context, Draft, Grammar
from specdec_jax.text import grammars
from specdec_jax.text.vocabularies import Vocabulary

GAMMA, BATCHES = 4, (1, 8, 64)
# As many tokens as Gemma 3 has.
WIDE_VOCAB_SIZE = 262_144


def table(repeats: int) -> Table:
  """The time of the masks of an iteration, by batch and vocabulary."""
  narrow = specdec_jax.load('smollm2-135m', drafter='none').vocabulary
  rows = []
  for vocabulary in (narrow, widened(narrow, WIDE_VOCAB_SIZE)):
    reader = grammars.Reader(vocabulary, vocabulary.vocab_size)
    schema = grammars.of_option('json_schema', json.dumps(people.PERSON))
    number = reader.number_of(schema)
    for batch in BATCHES:
      texts = [
        vocabulary.encode(people.json_of(i), add_special_tokens=False)
        for i in range(batch)
      ]
      turns = [read_texts(reader, number, texts) for _ in range(repeats)]
      median = statistics.median(itertools.chain.from_iterable(turns))
      cells: Cells = {
        'V': f'{vocabulary.vocab_size:,}',
        'batch': batch,
        'ms per iteration': f'{median * 1e3:.2f}',
        'ms per row': f'{median * 1e3 / batch:.3f}',
      }
      rows.append(cells)
  return Table(
    rows=rows,
    notes=[
      f'A schema of 5 fields, gamma {GAMMA}. Drafts are right up to a random '
      f'token; they are completed, and the masks of all {GAMMA + 1} positions '
      f'are made. Medians of all iterations of {repeats} turns in which no '
      'text has ended. The larger vocabulary has further tokens, each of which '
      'is two of the smaller one.'
    ],
  )


def widened(vocabulary: Vocabulary, vocab_size: int) -> Vocabulary:
  """A vocabulary with further tokens, which no text is encoded to: each is one
  of the more common tokens after another."""
  parts = json.loads(vocabulary.tokenizer.to_str())
  tokens = parts['model']['vocab']
  common = list(tokens)[300:1300]
  for first, second in itertools.product(common, common):
    if len(tokens) == vocab_size:
      break
    tokens.setdefault(first + second, len(tokens))
  tokenizer = tokenizers.Tokenizer.from_str(json.dumps(parts))
  return dataclasses.replace(vocabulary, tokenizer=tokenizer)


def read_texts(
  reader: grammars.Reader, number: int, texts: Sequence[Sequence[int]]
) -> list[float]:
  """Has texts decoded in drafts; seconds of each iteration that has all."""
  rng = np.random.default_rng(0)
  num_rows, width = len(texts), max(map(len, texts)) + GAMMA
  tokens = np.zeros((num_rows, width), np.int32)
  for row, text in zip(tokens, texts, strict=True):
    row[: len(text)] = text
  ends = np.array([*map(len, texts)])
  lengths = np.zeros(num_rows, np.int32)
  seconds = []
  while (lengths < ends).all():
    places = lengths[:, None] + np.arange(GAMMA)
    drafted = np.take_along_axis(tokens, places, axis=1)
    num_right = rng.integers(GAMMA + 1, size=num_rows)
    is_right = np.arange(GAMMA) < num_right[:, None]
    others = rng.integers(tokens.max() + 1, size=drafted.shape)
    context = Context(
      tokens=tokens,
      lengths=lengths,
      starts=np.zeros_like(lengths),
      grammar=Grammar(numbers=np.full_like(lengths, number), read=reader),
    )
    draft = Draft(
      tokens=np.where(is_right, drafted, others).astype(np.int32),
      probs=None,
      lengths=np.full_like(lengths, GAMMA),
    )
    began = time.perf_counter()
    reader(
      *(np.arange(num_rows), context, draft),
      paths=np.arange(GAMMA + 1)[None],
      completes=True,
      is_certain=True,
    )
    seconds.append(time.perf_counter() - began)
    lengths = lengths + num_right.astype(np.int32) + 1
  return seconds
