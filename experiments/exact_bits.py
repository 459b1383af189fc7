"""Counts the texts that drafts leave as they are, with and without exact_bits.

    python -m experiments.exact_bits --drafters prompt_lookup,eagle+tree:8=HEAD

The suite's prompts are decoded greedily in bfloat16, in batches. Tokens, and
bits of their log-probabilities, are compared with those of plain decoding.
"""

import argparse
import itertools
import sys
from collections.abc import Sequence
from pathlib import Path

import jax
import numpy as np

import specdec_jax
from experiments import common
from experiments.suite import examples
from experiments.suite.settings import Settings
from specdec_jax.assembly.completions import Completion
from specdec_jax.assembly.decoder import Decoder
from specdec_jax.models import families

# Gamma, and the depth of trees.
DEPTH = 4
# Texts of more tokens are decoded apart: all are padded to the longest.
_SHORT = 256


def main(argv: Sequence[str] | None = None) -> int:
  parser = argparse.ArgumentParser(
    prog='python -m experiments.exact_bits',
    description=(__doc__ or '').splitlines()[0],
  )
  add = parser.add_argument
  add('--target', default='smollm2-135m')
  add(
    '--drafters',
    type=common.listed(),
    default=['prompt_lookup'],
    help='as in experiments.suite, such as model+tree:8=ende-nano',
  )
  common.add_counts(parser, num_prompts=20, max_new_tokens=48, batch_size=8)
  args = parser.parse_args(argv)
  return common.finish('exact_bits', lambda: _run(args))


def _run(args: argparse.Namespace) -> None:
  settings = Settings(dtype='bfloat16')
  for exact_bits, text in itertools.product((True, False), args.drafters):
    choice = settings.drafter(text, Path())
    decoder = specdec_jax.load(
      args.target,
      drafter=type(choice)(**(vars(choice) | {'gamma': DEPTH})),
      dtype='bfloat16',
      exact_bits=exact_bits,
    )
    found = []
    for texts in _by_length(decoder, args.num_prompts):
      plain, drafted = (
        specdec_jax.generate(
          each,
          texts,
          max_new_tokens=args.max_new_tokens,
          batch_size=args.batch_size,
          chat=decoder.vocabulary.chat_template is not None,
        )
        for each in (decoder.at(0), decoder)
      )
      found += map(_compared, plain, drafted)
    tokens, bits = np.sum(found, axis=0)
    print(
      f'jax {jax.__version__}, {text}, exact_bits {exact_bits}: of '
      f'{len(found)} texts {tokens} have the same tokens, {bits} the same bits',
      flush=True,
    )


def _compared(plain: Completion, drafted: Completion) -> tuple[bool, bool]:
  """Tells whether tokens are equal, and whether bits are, too."""
  bits = [np.float32(each.log_probs).tobytes() for each in (plain, drafted)]
  is_same = plain.tokens == drafted.tokens
  return is_same, is_same and bits[0] == bits[1]


def _by_length(decoder: Decoder, count: int) -> list[list[str]]:
  """Returns so many prompts of each category and texts of random tokens, long
  ones apart; for a translator the texts of translations."""
  vocabulary = decoder.vocabulary
  is_translator = families.has_encoder(decoder.config)
  texts = [
    examples.shown(each, is_translator)
    for name, own in examples.own().items()
    for each in own[:count]
    if name == examples.TRANSLATION or not is_translator
  ]
  ids = sorted(set(range(vocabulary.vocab_size)) - vocabulary.special_ids)
  texts += map(vocabulary.decode, examples.random_tokens(ids, count))
  length = lambda text: len(vocabulary.encode(text))
  texts.sort(key=length)
  groups = itertools.groupby(texts, lambda text: length(text) > _SHORT)
  return [list(part) for _, part in groups]


if __name__ == '__main__':
  sys.exit(main())
