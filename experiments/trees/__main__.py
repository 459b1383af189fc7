"""Compares trees of drafts with chains of the same drafter.

    python -m experiments.trees
    python -m experiments.trees --tables=accelerators

It makes three tables: how often the target's token is a drafter's first, second
and further choice; tokens per target run and speed of the trees that follow
from these ranks; and the cost of scoring a tree against a chain of as many
tokens, predicted from programs that are compiled for TPUs which need not be
attached.
"""

import argparse
import dataclasses
import functools
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

import specdec_jax
from experiments import common, report
from experiments.report import Cells, Table
from experiments.suite import examples
from specdec_jax import theory
from specdec_jax.assembly import decoder as decoder_lib
from specdec_jax.assembly import packing, running
from specdec_jax.assembly.decoder import Decoder
from specdec_jax.assembly.drafters import NoDrafter, PromptLookup
from specdec_jax.assembly.lengths import Fixed
from specdec_jax.assembly.running import DecodeSettings
from specdec_jax.base import Params, Tree
from specdec_jax.measure import calibration, gamma_search
from specdec_jax.planning import aot, parts, workloads
from specdec_jax.text.prompts import Batch
from specdec_jax.theory import trees

MODULE = 'experiments.trees'
# Of all drafts that are timed: trees have more nodes, and are no deeper.
DEPTH = 4
NUM_NODES = (8, 16)
CATEGORIES = ('chat', 'coding', 'summarisation')
# Scored on TPUs.
NUM_SCORED = (8, 16, 32)
_PLAIN = 'plain'


@dataclasses.dataclass(frozen=True, kw_only=True)
class Pair:
  """A target and a drafter, and the categories of the suite for them."""

  target: str
  drafter: str
  options: Mapping[str, Any]
  categories: Sequence[str]
  is_chat: bool = False


def pairs(eagle: str | None) -> list[Pair]:
  """Those that come with the package, and an EAGLE-3 network for SmolLM2 if
  there is one."""
  ende = Pair(
    target='ende-mini',
    drafter='ende-nano',
    options={'draft_model': 'ende-nano'},
    categories=(examples.TRANSLATION,),
  )
  chat = {'target': 'smollm2-135m', 'categories': CATEGORIES, 'is_chat': True}
  copies = Pair(drafter='prompt_lookup', options={}, **chat)
  if eagle is None:
    return [ende, copies]
  options = {'drafter': 'eagle', 'draft_model': eagle}
  return [ende, copies, Pair(drafter='eagle', options=options, **chat)]


class Prepared:
  """A pair with its weights, and its prompts in batches of one shape."""

  def __init__(self, pair: Pair, args: argparse.Namespace):
    self.pair = pair
    self.settings = DecodeSettings(
      max_new_tokens=args.num_new, chat=pair.is_chat
    )
    self.chain = specdec_jax.load(pair.target, gamma=DEPTH, **pair.options)
    own = examples.own()
    texts = [
      examples.shown(example, is_translator=not pair.is_chat)
      for name in pair.categories
      for example in own[name][: args.num_prompts]
    ]
    batches = packing.pack(self.chain, texts, self.settings)
    count = len(texts) // len(pair.categories)
    self.batches: dict[str, list[Batch]] = {
      name: batches[i * count : (i + 1) * count]
      for i, name in enumerate(pair.categories)
    }

  def with_drafter(self, choice: Any) -> Decoder:
    """The decoder with another drafter of the same weights."""
    chain = self.chain
    made = decoder_lib.outline(
      chain.model, drafter=choice, sampling=chain.sampling
    )
    params = chain.params
    if isinstance(choice, NoDrafter):
      params = Params(target=params.target)
    return dataclasses.replace(made, params=params)

  def rank_rates(self, category: str) -> np.ndarray:
    """As of `calibration.rank_rates`, on the texts of a category."""
    decoder, batches = self.chain, self.batches[category]
    num_new = self.settings.max_new_tokens
    return calibration.rank_rates(
      decoder.params,
      jax.random.key(0),
      [batch.prompt for batch in batches],
      drafter=decoder.ranked_drafter(trees.NUM_RANKS),
      method=decoder.method,
      max_len=running.max_length(decoder, batches[0], num_new),
      num_tokens=num_new,
    )

  def ways(self, rates: np.ndarray) -> dict[str, Decoder]:
    """Plain decoding, a chain, and trees that are no deeper: those with the
    most expected tokens, or several copies."""
    choice, found = (
      self.chain.recipe.drafter,
      {_PLAIN: self.with_drafter(NoDrafter())},
    )
    found[f'chain of {DEPTH}'] = self.chain
    for num_nodes in NUM_NODES:
      if isinstance(choice, PromptLookup):
        changed: Cells = {'num_continuations': num_nodes // DEPTH}
      else:
        changed = {'tree': trees.best_tree(rates, num_nodes, DEPTH)}
      tree = dataclasses.replace(choice, **changed)
      found[f'tree of {num_nodes}'] = self.with_drafter(tree)
    return found


def ranks(prepared: Sequence[Prepared]) -> tuple[Table, dict[str, np.ndarray]]:
  """Rank rates by category; and by drafter, their means, none increasing."""
  rows, pooled = [], {}
  for each in prepared:
    pair, found = each.pair, []
    for category in pair.categories:
      found.append(each.rank_rates(category))
      rows.append(_rank_row(pair, category, found[-1]))
    mean = np.minimum.accumulate(np.mean(found, axis=0))
    pooled[pair.drafter] = mean
    if len(found) > 1:
      rows.append(_rank_row(pair, 'all', np.mean(found, axis=0)))
  notes = (
    'Greedy text of the target, token by token. Of prompt lookup these are '
    'its continuations in their order; where there are fewer, the others count '
    'as misses.',
  )
  return Table(rows=rows, notes=notes), pooled


def _rank_row(pair: Pair, category: str, rates: np.ndarray) -> Cells:
  names = {'target': pair.target, 'drafter': pair.drafter}
  columns = {f'a_{i}': f'{rate:.3f}' for i, rate in enumerate(rates, start=1)}
  return names | {'category': category} | columns


def speeds(
  prepared: Sequence[Prepared], pooled: Mapping[str, np.ndarray], repeats: int
) -> Table:
  """Tokens per target run and speed of chains and trees."""
  rows, num_other = [], 0
  shapes = []
  for each in prepared:
    rates = pooled[each.pair.drafter]
    ways = each.ways(rates)
    first = next(iter(each.batches.values()))[0]
    decodes = {
      name: gamma_search.compile_for(decoder, first, each.settings)
      for name, decoder in ways.items()
    }
    for name, decoder in ways.items():
      if decoder.drafter.tree and not isinstance(
        decoder.recipe.drafter, PromptLookup
      ):
        parents = ', '.join(map(str, decoder.drafter.tree.parents))
        shapes.append(f'{each.pair.drafter}, {name}: parents {parents}.')
    for category, batches in each.batches.items():
      found, others = _measure(decodes, batches, repeats)
      num_other += others
      for name, decoder in ways.items():
        if name != _PLAIN:
          names = {'target': each.pair.target, 'drafter': each.pair.drafter}
          expected = _expected(decoder, rates)
          cells = {'draft': name, 'expected tokens per run': expected}
          rows.append(names | {'category': category} | cells | found[name])
  notes = [
    'Float32, batch 1, greedy, after the prefill; speed is over plain decoding '
    'by the same loop. A tree of copies is several continuations of '
    f'{DEPTH} tokens; other trees are at most {DEPTH} deep and have the most '
    'expected tokens by the rank rates of all categories, on which the '
    'expectation rests too.',
    f"Texts that differ from plain decoding's, by near ties: {num_other}.",
    *shapes,
  ]
  return Table(rows=rows, notes=notes)


def _expected(decoder: Decoder, rates: np.ndarray) -> float | None:
  """By rates that are the same at each depth, which those of copies are not."""
  if isinstance(decoder.recipe.drafter, PromptLookup):
    return None
  tree = decoder.drafter.tree
  parents = tree.parents if tree else tuple(range(DEPTH))
  return trees.expected_tokens_of_tree(parents, rates)


def _measure(
  decodes: Mapping[str, Any], batches: Sequence[Batch], repeats: int
) -> tuple[dict[str, Cells], int]:
  """Figures of each way but plain decoding, and how many texts differ from its:
  ways take turns, batch by batch."""
  seconds = {name: np.zeros((repeats, len(batches))) for name in decodes}
  tokens, runs = dict.fromkeys(decodes, 0), dict.fromkeys(decodes, 0)
  num_other = 0
  for turn in range(repeats):
    for i, batch in enumerate(batches):
      texts = {}
      for name, decode in decodes.items():
        output, visit = decode(batch)
        seconds[name][turn, i] = visit.loop_seconds
        if not turn:
          texts[name] = np.asarray(output.tokens)
          tokens[name] += int(output.statistics.num_tokens.sum())
          runs[name] += int(output.statistics.num_target_runs.sum())
      num_other += sum(
        not np.array_equal(text, texts[_PLAIN]) for text in texts.values()
      )
  pace = {
    name: tokens[name] / float(np.median(each, axis=0).sum())
    for name, each in seconds.items()
  }
  return {
    name: {
      'tokens per run': tokens[name] / runs[name],
      'speed': pace[name] / pace[_PLAIN],
    }
    for name in decodes
    if name != _PLAIN
  }, num_other


def accelerators(topologies: Sequence[str], name: str, batch: int) -> Table:
  """Scoring of trees and of chains, by roofline; nothing is run."""
  rates = trees.assumed_rates(trees.DEFAULT_ALPHA)
  shapes = [Tree(trees.best_tree(rates, n, DEPTH)) for n in NUM_SCORED]
  of_chain = float(theory.expected_tokens(trees.DEFAULT_ALPHA, DEPTH))
  rows = []
  for topology in topologies:
    plain, costs = _priced(topology, name, batch, shapes)
    for tree, (chain_cost, tree_cost) in zip(shapes, costs, strict=True):
      rows.append(
        {
          **{'slice': topology, 'target': name, 'batch': batch},
          'nodes': len(tree.parents),
          'plain step, ms': f'{1e3 * plain:.3f}',
          'chain, ms': f'{1e3 * chain_cost:.3f}',
          'tree, ms': f'{1e3 * tree_cost:.3f}',
          'tree over chain': tree_cost / chain_cost,
          'tree over plain step': tree_cost / plain,
          f'tokens, chain of {DEPTH}': of_chain,
          'tokens, tree': trees.expected_tokens_of_tree(tree.parents, rates),
        }
      )
  notes = (
    'Predictions: iterations without drafting are compiled for the slice, the '
    'tree with its ancestor mask, the walk and the moving of its path, and '
    'priced by a roofline; nothing was run. The chain has as many tokens as '
    'the tree has nodes.',
    f'Tokens per target run are expected ones at alpha {trees.DEFAULT_ALPHA}, '
    'if later ranks are accepted as `theory.trees.assumed_rates` says; trees '
    f'are at most {DEPTH} deep.',
  )
  return Table(rows=rows, notes=notes)


def _priced(
  topology: str, name: str, batch: int, shapes: Sequence[Tree]
) -> tuple[float, list[tuple[float, float]]]:
  """Seconds of a plain step, and of the iterations that score a chain and a
  tree of each size."""
  slice_ = aot.find_slice(topology)
  decoder = workloads.decoder_of(name, 'none', None, dtype='bfloat16')
  workload = workloads.Workload(
    slice=slice_,
    decoder=decoder,
    batch_size=batch,
    input_length=512,
    output_length=128,
    num_partitions=workloads.default_num_partitions(slice_, batch),
  )
  without_draft = parts.shapes_of(workload, Fixed(0))
  step = functools.partial(parts.target_step, without_draft)
  jobs = [step(1)]
  for tree in shapes:
    width = len(tree.parents) + 1
    jobs += [step(width), step(width, tree)]
  plain, *costs = aot.price(aot.compile_all(jobs), slice_.chip)
  seconds = [cost.seconds for cost in costs]
  return plain.seconds, [*zip(seconds[::2], seconds[1::2], strict=True)]


TABLES = ('ranks', 'speed', 'accelerators')


def run(args: argparse.Namespace, argv: Sequence[str]) -> None:
  where = (MODULE, argv), Path(args.output)
  if {'ranks', 'speed'} & {*args.tables}:
    prepared = [Prepared(pair, args) for pair in pairs(args.eagle)]
    pooled: dict[str, np.ndarray] = {}

    def ranked() -> Table:
      table, means = ranks(prepared)
      pooled.update(means)
      return table

    title = 'How often the target says what is ranked first, second, ...'
    report.measure(*where, 'ranks', title, ranked)
    if 'speed' in args.tables:
      measured = functools.partial(speeds, prepared, pooled, args.repeats)
      title = 'Trees and chains of the same drafter'
      report.measure(*where, 'speed', title, measured)
  if 'accelerators' in args.tables:
    predicted = functools.partial(
      accelerators, args.topologies, args.preset, args.batch_size
    )
    title = 'Scoring trees and chains on TPUs: predictions'
    report.measure(*where, 'accelerators', title, predicted)


def main(argv: Sequence[str] | None = None) -> int:
  argv = sys.argv[1:] if argv is None else argv
  parser = argparse.ArgumentParser(
    prog=f'python -m {MODULE}', description=__doc__.splitlines()[0]
  )
  parser.add_argument('--output', default='experiments/trees/results')
  parser.add_argument(
    '--eagle', metavar='FOLDER', help='an EAGLE-3 network for smollm2-135m'
  )
  parser.add_argument(
    '--topologies',
    type=common.listed(),
    default=['v4:1x1x1', 'v5e:1x1'],
    help='slices to compile for, with commas between',
  )
  parser.add_argument('--preset', default='llama_3_2_3b', help='scored on them')
  common.add_tables(parser, TABLES)
  common.add_counts(parser, num_prompts=6, num_new=48, repeats=3, batch_size=1)
  args = parser.parse_args(argv)
  return common.finish('trees', lambda: run(args, argv))


if __name__ == '__main__':
  sys.exit(main())
