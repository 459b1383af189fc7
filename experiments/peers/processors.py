"""Compares greedy tokens with logit processors with those of transformers.

    pip install -e '.[peers]'
    python -m experiments.peers.processors

Here all settings share batches, drafted by prompt lookup; transformers decodes
row by row. The model is SmolLM2-135M in float32, with the 26 prompts of
short.jsonl and demo.jsonl.
"""

import argparse
import functools
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import specdec_jax
from experiments import common, report
from experiments.peers import systems, weights
from experiments.report import Cells, Table
from specdec_jax.assembly import packing, running

MODULE = 'experiments.peers.processors'
PROMPTS = Path(__file__).resolve().parent.parent / 'prompts'
# Ids of words that its answers are full of, such as ' the' and ','.
COMMON = [260, 28, 284, 282, 198]
WAYS: dict[str, dict[str, Any]] = {
  'none': {},
  'repetition_penalty': {'repetition_penalty': 1.3},
  'no_repeat_ngram_size': {'no_repeat_ngram_size': 2},
  'encoder_repetition_penalty': {'encoder_repetition_penalty': 1.5},
  'encoder_no_repeat_ngram_size': {'encoder_no_repeat_ngram_size': 2},
  'sequence_bias': {'sequence_bias': [[[28], -4.0], [[260, 965], 3.0]]},
  'bad_words_ids': {'bad_words_ids': [[30], [260, 965], [282, 260]]},
  'min_new_tokens': {'min_new_tokens': 14},
  'suppress_tokens': {'suppress_tokens': COMMON},
  'begin_suppress_tokens': {'begin_suppress_tokens': [504, 57, 788, 1095]},
  'forced_eos_token_id': {'forced_eos_token_id': [2]},
}
WAYS['all of them'] = {k: v for way in WAYS.values() for k, v in way.items()}


def main(argv: Sequence[str] | None = None) -> int:
  argv = sys.argv[1:] if argv is None else argv
  parser = argparse.ArgumentParser(prog=f'python -m {MODULE}')
  parser.add_argument('--output', default='experiments/peers/results')
  parser.add_argument('--weights', default='out/peers')
  common.add_counts(
    parser, num_prompts=26, max_new_tokens=16, batch_size=24, gamma=4
  )
  args = parser.parse_args(argv)
  return common.finish(
    'processors',
    lambda: report.measure(
      (MODULE, argv),
      Path(args.output),
      'processors',
      'smollm2-135m, float32: greedy tokens with processors of logits',
      functools.partial(table, args),
    ),
  )


def table(args: argparse.Namespace) -> Table:
  lines = [
    line
    for name in ('short', 'demo')
    for line in (PROMPTS / f'{name}.jsonl').read_text().splitlines()
  ]
  task = systems.Task(
    model='smollm2-135m',
    draft_model=None,
    folder=Path(args.weights) / 'smollm2-135m',
    texts=[json.loads(line)['prompt'] for line in lines][: args.num_prompts],
    is_chat=True,
    num_new=args.max_new_tokens,
    gamma=args.gamma,
  )
  ids, eos_ids, ours = _ours(task, args.batch_size)
  weights.write(task)
  other = systems.transformers(task, 'float32', ids, eos_ids)
  decode: Any = other.ways['none']
  theirs = {
    way: [decode(i, **settings) for i in range(len(ids))]
    for way, settings in WAYS.items()
  }
  return Table(
    rows=[_row(way, ours[way], theirs) for way in WAYS],
    notes=[
      f'{len(ids)} prompts, {task.num_new} new tokens at most; here in batches '
      f'of {args.batch_size} rows of different ways, gamma {task.gamma}, there '
      f'alone. {other.version}',
    ],
  )


def _ours(
  task: systems.Task, batch_size: int
) -> tuple[list[list[int]], Sequence[int], dict[str, list[list[int]]]]:
  """Prompts as token ids, what ends a text, and new tokens by way."""
  decoder = specdec_jax.load(
    task.model, drafter='prompt_lookup', gamma=task.gamma
  )
  # Texts of all ways take turns, so that no batch has one alone.
  texts = [text for text in task.texts for _ in WAYS]
  names = dict.fromkeys(name for way in WAYS.values() for name in way)
  settings: Any = {
    name: [way.get(name) for _ in task.texts for way in WAYS.values()]
    for name in names
  }
  found = specdec_jax.generate(
    decoder,
    texts,
    max_new_tokens=task.num_new,
    chat=task.is_chat,
    batch_size=batch_size,
    **settings,
  )
  tokens = [list(each.tokens) for each in found]
  plain = running.DecodeSettings(max_new_tokens=1, chat=task.is_chat)
  prompts = [
    batch.prompt.decoder_tokens[0, : batch.prompt.decoder_lengths[0]].tolist()
    for batch in packing.pack(decoder, task.texts, plain)
  ]
  ways = {way: tokens[i :: len(WAYS)] for i, way in enumerate(WAYS)}
  return prompts, decoder.method.eos_id, ways


def _row(
  way: str, ours: list[list[int]], theirs: dict[str, list[list[int]]]
) -> Cells:
  pairs = [*zip(ours, theirs[way], strict=True)]
  changed = sum(
    a != b for a, b in zip(theirs[way], theirs['none'], strict=True)
  )
  return {
    'processor': way,
    'same tokens': f'{sum(a == b for a, b in pairs)} of {len(pairs)}',
    'texts that it changes': str(changed),
  }


if __name__ == '__main__':
  sys.exit(main())
