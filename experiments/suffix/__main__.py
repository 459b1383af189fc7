"""Compares drafts from earlier outputs with prompt lookup and n-grams.

    python -m experiments.suffix

Tokens per target run are exact figures; the time of a proposal is a median.
"""

import argparse
import itertools
import statistics
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

import specdec_jax
from experiments import common, report
from experiments.report import Cells, Table
from experiments.suite import examples
from specdec_jax import drafters
from specdec_jax.assembly import completions, packing, running
from specdec_jax.assembly.completions import Completion
from specdec_jax.assembly.decoder import Decoder
from specdec_jax.base import Array, Arrays, Context, Drafter
from specdec_jax.drafters import text_pool
from specdec_jax.measure import stopwatch

MODULE = 'experiments.suffix'
MODELS = 'smollm2-135m', 'ende-mini'
GAMMA = 8
# What is long takes long, and has more tokens than the others are padded to.
LEFT_OUT = 'long input', examples.CONTROL
SIMILAR = '{}\n\nBe brief.'
# Tokens of the pools and of the context whose proposals are timed.
POOLS = 2**17, 10_000_000
CONTEXT, NUM_PROPOSALS, NUM_TURNS = 512, 200, 9


class Requests:
  """Requests to a model, one after the other, each drafted in three ways; ngram
  counts all of them."""

  def __init__(self, model: str, texts: Sequence[str], max_new_tokens: int):
    load = lambda drafter, **more: specdec_jax.load(
      model, drafter=drafter, gamma=GAMMA, **more
    )
    with tempfile.NamedTemporaryFile('w', suffix='.txt') as file:
      file.write('\n\n'.join(texts))
      file.flush()
      self.ways = {
        'prompt_lookup': load('prompt_lookup'),
        'ngram': load('ngram', ngram_text=file.name),
        'suffix': load('suffix'),
      }
    vocabulary = self.ways['suffix'].vocabulary
    self.settings = running.DecodeSettings(
      max_new_tokens=max_new_tokens, chat=vocabulary.chat_template is not None
    )
    batches = packing.pack(self.ways['suffix'], texts, self.settings)
    self.batches = dict(zip(texts, batches, strict=True))
    self.num_different = 0

  def decode(self, decoder: Decoder, text: str) -> Completion:
    batch = self.batches[text]
    decode = running.compile_decode(decoder, batch, self.settings)
    output = jax.device_get(decode(batch, ()))
    return completions.of_row(decoder, batch, output, 0)

  def row(self, name: str, texts: Sequence[str]) -> Cells:
    """Tokens per target run of each way; suffix remembers every request."""
    found: dict[str, list[Completion]] = {way: [] for way in self.ways}
    for text, way in itertools.product(texts, self.ways):
      done = self.decode(self.ways[way], text)
      found[way].append(done)
      if way == 'suffix':
        self.ways[way] = self.ways[way].remember([done.context])
    tokens = {
      way: [each.tokens for each in done] for way, done in found.items()
    }
    self.num_different += sum(
      len(set(each)) > 1 for each in zip(*tokens.values(), strict=True)
    )
    total = lambda done, key: sum(each.statistics[key] for each in done)
    rates = {
      way: total(done, 'tokens') / total(done, 'target_runs')
      for way, done in found.items()
    }
    ratio = rates['suffix'] / rates['prompt_lookup']
    print(name, rates, file=sys.stderr, flush=True)
    cells = {way: f'{rate:.2f}' for way, rate in rates.items()}
    return {
      'requests': name,
      'number': len(texts),
      **cells,
      'suffix / prompt_lookup': f'{ratio:.2f}',
    }


def requests(num_prompts: int, max_new_tokens: int) -> Table:
  """Categories of the suite, then the same and similar ones, then
  translations."""
  sets = {
    name: [examples.shown(each, False) for each in given[:num_prompts]]
    for name, given in examples.own().items()
    if name not in LEFT_OUT
  }
  texts = list(itertools.chain(*sets.values()))
  similar = [SIMILAR.format(text) for text in texts]
  chat = Requests(MODELS[0], [*texts, *similar], max_new_tokens)
  rows = [chat.row(name, given) for name, given in sets.items()]
  rows.append(chat.row('all of them again', texts))
  rows.append(chat.row('all, with a sentence more', similar))
  pair = Requests(MODELS[1], examples.SENTENCES, max_new_tokens)
  rows.append(pair.row('translations of similar sentences', examples.SENTENCES))
  rows.append(pair.row('these again', examples.SENTENCES))
  different = chat.num_different + pair.num_different
  return Table(
    rows=rows,
    notes=[
      f'Greedy, float32, gamma {GAMMA}, {max_new_tokens} tokens; {different} '
      'requests whose tokens differ between drafters. Requests are decoded one '
      'after the other, and suffix remembers each.'
    ],
  )


def proposals(drafter: Drafter, params: Arrays, tokens: Array) -> Callable:
  """Runs many proposals in one program, each after another token."""

  def run(params: Arrays, tokens: Array) -> Array:
    def one(i: Array, total: Array) -> Array:
      lengths = jnp.full(len(tokens), CONTEXT - 64, jnp.int32) + total % 64
      context = Context(tokens=tokens, lengths=lengths)
      draft, _ = drafter.propose(params, None, context, ())
      return total + 1 + jnp.sum(draft.tokens, axis=1) % 2

    return jax.lax.fori_loop(0, NUM_PROPOSALS, one, jnp.zeros(len(tokens), int))

  compiled = jax.jit(run)
  jax.block_until_ready(compiled(params, tokens))
  return lambda: stopwatch.run_seconds(compiled, params, tokens)[1]


def costs(max_new_tokens: int) -> Table:
  """The time and the memory of proposals, beside a plain step's."""
  rng = np.random.default_rng(0)
  words = lambda *shape: (rng.zipf(1.2, shape) % 49_152).astype(np.int32)
  plain = specdec_jax.load(MODELS[0], drafter='none')
  settings = running.DecodeSettings(max_new_tokens=max_new_tokens)
  [batch] = packing.pack(plain, ['The sea is'], settings)
  decode = running.compile_decode(plain, batch, settings)
  step = lambda: stopwatch.run_seconds(decode, batch, ())[1] / max_new_tokens
  timed = {'plain step': step}
  pools = {size: text_pool.empty(size) for size in POOLS}
  for size, pool in pools.items():
    pools[size] = jax.device_put(text_pool.remember(pool, [words(size - 2)]))
    for num_rows in (1, 8):
      drafter = drafters.suffix(gamma=GAMMA)
      timed[size, num_rows] = proposals(
        drafter, pools[size], jnp.asarray(words(num_rows, CONTEXT))
      )
  # In turns: what else the machine does hits all of them.
  turns = [{k: run() for k, run in timed.items()} for _ in range(NUM_TURNS)]
  median = {k: statistics.median(turn[k] for turn in turns) for k in timed}
  plain_seconds, rows = median.pop('plain step'), []
  for (size, num_rows), seconds in median.items():
    seconds /= NUM_PROPOSALS
    rows.append(
      {
        'tokens of the pool': f'{size:,}',
        'its bytes': f'{sum(x.nbytes for x in jax.tree.leaves(pools[size])):,}',
        'rows': num_rows,
        'microseconds per proposal': f'{seconds * 1e6:.0f}',
        'of a plain step of one row': f'{seconds / plain_seconds:.2%}',
      }
    )
  return Table(
    rows=rows,
    notes=[
      f'A plain step of SmolLM2-135M in float32 took {plain_seconds * 1e3:.1f} '
      f'ms. Contexts of {CONTEXT} tokens, medians of {NUM_TURNS} turns.'
    ],
  )


def main(argv: Sequence[str] | None = None) -> int:
  argv = sys.argv[1:] if argv is None else argv
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument(
    '--output', type=Path, default=Path('experiments/suffix/results')
  )
  common.add_counts(parser, num_prompts=2, max_new_tokens=32)
  args = parser.parse_args(argv)
  tables = {
    'requests': (
      'Tokens per target run',
      lambda: requests(args.num_prompts, args.max_new_tokens),
    ),
    'costs': ('What a proposal costs', lambda: costs(args.max_new_tokens)),
  }

  def run() -> None:
    for name, (title, make) in tables.items():
      report.measure((MODULE, argv), args.output, name, title, make)

  return common.finish('suffix', run)


if __name__ == '__main__':
  sys.exit(main())
