"""What is compared: the drafters of each target, and how they are trained."""

from collections.abc import Mapping
from typing import Any, NamedTuple

# Tokens of a draft, in all drafters.
GAMMA = 6
MIN_CONFIDENCE = 0.3
# Of rows of ende-mini's texts: one program is compiled for each.
_LENGTHS = (24, 64)
_BLOCK_ENDE = 'experiments/block/gin/debian_ende_block.gin'
_BLOCK_SMOLLM2 = 'experiments/block/gin/smollm2_block.gin'


class Recipe(NamedTuple):
  """A drafter, and how it is trained.

  Attributes:
    title: in tables.
    drafter: for `--drafter`.
    training: its gin file, or the module that trains it; empty for a drafter
      with the weights of another.
    macros: of the gin file, besides those of `training`.
    weights_of: the name of the recipe whose weights it has.
    options: of decoding.
  """

  title: str
  drafter: str
  training: str = ''
  macros: Mapping[str, Any] = {}
  weights_of: str | None = None
  options: tuple[str, ...] = ()


class Target(NamedTuple):
  """A target, and what is compared behind it.

  Attributes:
    recipes: by name.
    shipped: titles and drafters of the models that come with the package.
    absent: drafters that it cannot have, and why.
    options: of decoding.
    timed_texts: for the speeds: a file of prompts, how many of them, evenly
      spread, and the new tokens of each.
    gammas: of the drafts that are timed.
  """

  recipes: Mapping[str, Recipe]
  shipped: Mapping[str, tuple[str, str]]
  absent: str
  options: tuple[str, ...]
  timed_texts: tuple[str, int, int]
  gammas: tuple[int, ...]


_WITH_CONFIDENCE = ('--min_confidence', str(MIN_CONFIDENCE))
_ENDE = {
  'draft_model': Recipe(
    'draft model',
    'model',
    'gin_configs/train/debian_ende_nano_distilled.gin',
    macros={'TARGET': 'ende-mini', 'LEARNING_RATE': 0.1},
  ),
  'spec_drafter': Recipe(
    'Spec-Drafter',
    'spec_drafter',
    'experiments/xia2023/gin/debian_ende_spec_drafter.gin',
    macros={
      'TARGET': 'ende-mini',
      'DRAFTER': 'mini_2_1',
      'DTYPE': 'bfloat16',
      'GAMMA': GAMMA,
      'LENGTHS': _LENGTHS,
      'LEARNING_RATE': 0.0015,
    },
  ),
  'independent': Recipe(
    'block, independent slots',
    'block',
    _BLOCK_ENDE,
    macros={'LENGTHS': _LENGTHS, 'MARKOV_RANK': 0},
  ),
  'chain': Recipe(
    'block, chain', 'block', _BLOCK_ENDE, macros={'LENGTHS': _LENGTHS}
  ),
  'confidence': Recipe(
    f'block, chain, confidence of {MIN_CONFIDENCE}',
    'block',
    weights_of='chain',
    options=_WITH_CONFIDENCE,
  ),
}
_SMOLLM2 = {
  'draft_model': Recipe(
    'draft model', 'model', 'experiments.block.draft_model'
  ),
  'eagle': Recipe(
    'EAGLE-3',
    'eagle',
    'gin_configs/train/smollm2_eagle.gin',
    macros={'NUM_STEPS': 3, 'LEARNING_RATE': 0.001},
  ),
  'independent': Recipe(
    'block, independent slots',
    'block',
    _BLOCK_SMOLLM2,
    macros={'MARKOV_RANK': 0},
  ),
  'chain': Recipe('block, chain', 'block', _BLOCK_SMOLLM2),
  'confidence': Recipe(
    f'block, chain, confidence of {MIN_CONFIDENCE}',
    'block',
    weights_of='chain',
    options=_WITH_CONFIDENCE,
  ),
}
TARGETS = {
  'ende-mini': Target(
    recipes=_ENDE,
    shipped={
      'ende-nano': ('draft model', 'model'),
      'ende-spec-drafter': ('Spec-Drafter', 'spec_drafter'),
      'ende-block': ('block, chain', 'block'),
    },
    absent='EAGLE-3 drafters are for decoders without an encoder, here as in '
    'their paper.',
    options=(),
    timed_texts=('experiments/prompts/short.jsonl', 24, 48),
    gammas=(3, GAMMA),
  ),
  'smollm2-135m': Target(
    recipes=_SMOLLM2,
    shipped={'smollm2-135m-eagle': ('EAGLE-3', 'eagle')},
    absent='a Spec-Drafter reads the source of an encoder-decoder.',
    options=('--chat',),
    timed_texts=('experiments/prompts/chat.jsonl', 4, 48),
    gammas=(3,),
  ),
}
