"""What is measured: the options of the suite, and what they stand for."""

import argparse
import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from experiments import common
from experiments.suite import examples
from specdec_jax.assembly.drafters import DRAFTERS, DrafterChoice
from specdec_jax.assembly.drafters.choice import has_model
from specdec_jax.assembly.lengths import AUTO, gamma_number
from specdec_jax.assembly.models import Model
from specdec_jax.assembly.option_fields import by_name, option, options_of
from specdec_jax.assembly.rules import RULES, Rule
from specdec_jax.assembly.text_settings import TextSettings
from specdec_jax.launch.numbers import fraction, positive_int
from specdec_jax.models import presets

# What the n-gram drafter counts unless another text is given.
NGRAM_TEXT = 'ngram_text.txt'


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings:
  """What is measured; the fields are the options of the command."""

  targets: Sequence[str] = option(
    ('smollm2-135m', 'ende-mini'), 'models', type=common.listed()
  )
  categories: Sequence[str] | None = option(
    None,
    f'of {", ".join(examples.CATEGORIES)}, and of the public sets; by default '
    'what fits the target',
    type=common.listed(),
  )
  drafters: Sequence[str] | None = option(
    None,
    'prompt_lookup, ngram, uniform, none, or KIND=MODEL such as '
    'model=ende-nano; options follow, as in eagle+lookup=HEAD, '
    'prompt_lookup+max_ngram:2 or eagle+tree:8=HEAD, whose depth is the usual '
    'gamma; by default what the target comes with',
    type=common.listed(),
  )
  gammas: Sequence[int | str] = option(
    (4, 8),
    'of every drafter of chains; with auto among them, also what gamma auto '
    'chooses of these numbers on half of the prompts, measured on the others',
    type=common.listed(
      lambda text: AUTO if text == AUTO else gamma_number(text)
    ),
  )
  temperatures: Sequence[float] = option(
    (0.0,), '0 is greedy', type=common.listed(float)
  )
  batch_sizes: Sequence[int] = option(
    (1,), 'rows decoded at once', type=common.listed(positive_int)
  )
  num_prompts: int = option(
    5, 'the first ones of each category', type=positive_int
  )
  max_new_tokens: int = option(40, 'per prompt', type=positive_int)
  repeats: int = option(2, 'timed turns of each prompt', type=positive_int)
  verification: str = option(
    'speculative_sampling', 'the acceptance rule, such as greedy+lenience:0.5'
  )
  top_k: int | None = option(None, 'keep the k likeliest', type=positive_int)
  top_p: float | None = option(
    None, 'keep the likeliest with this much mass', type=fraction
  )
  min_p: float | None = option(
    None,
    "keep those with this share of the likeliest's probability",
    type=fraction,
  )
  dtype: str = option('float32', 'of weights and caches', type=common.dtype)
  draft_dtype: str | None = option(
    None, 'of draft models, unless that of the target', type=common.dtype
  )
  plain_dtypes: Sequence[str] = option(
    tuple(presets.DTYPES),
    'of plain decoding, to choose the fastest from',
    type=common.listed(common.dtype),
  )
  exact_bits: bool = option(
    False, 'also count the rows that are identical with exact_bits'
  )
  seed: int = option(0, 'of all draws')
  spec_bench: str = option('', 'folder of Spec-Bench, for its categories')
  speed_bench: str = option('', 'folder of SPEED-Bench, for its categories')

  def __post_init__(self):
    if max(self.batch_sizes) > self.num_prompts:
      raise ValueError(
        f'--batch_sizes {max(self.batch_sizes)} is more than --num_prompts '
        f'{self.num_prompts}'
      )
    if self.is_auto and not self.numbers:
      raise ValueError('--gammas auto chooses among numbers: give some')
    if self.is_auto and 2 * max(self.batch_sizes) > self.num_prompts:
      raise ValueError(
        f'--gammas auto needs a batch to choose on and one to measure: '
        f'--num_prompts {2 * max(self.batch_sizes)} or more'
      )
    self.sampling(max(self.temperatures)).check_is_used()
    for text in self.drafters or ():
      self.drafter(text, Path())
    self.rule()

  @property
  def numbers(self) -> list[int]:
    """The gammas that are measured on all prompts."""
    return [gamma for gamma in self.gammas if isinstance(gamma, int)]

  @property
  def is_auto(self) -> bool:
    return AUTO in self.gammas

  def rule(self) -> Rule:
    """Makes the acceptance rule."""
    return parsed('verification', RULES, self.verification)

  def sampling(self, temperature: float) -> TextSettings:
    """Makes the sampling at a temperature, greedy without limits at 0."""
    names = ('top_k', 'top_p', 'min_p')
    limits = {name: getattr(self, name) for name in names}
    if not temperature and max(self.temperatures):
      limits = {}
    return TextSettings(temperature=temperature, **limits)

  def drafter(self, text: str, folder: Path) -> DrafterChoice:
    """Makes the choice that `text` of `drafters` stands for, whose model is of
    `draft_dtype`; an n-gram table counts a file of `folder`."""
    kind, _, checkpoint = text.partition('=')
    fixed: dict[str, Any] = {}
    choice = by_name('drafter', DRAFTERS, kind.split('+')[0])
    if has_model(choice) != bool(checkpoint):
      form = 'takes no model' if checkpoint else 'is written KIND=MODEL'
      raise ValueError(f'--drafters {text}: {kind} {form}')
    if checkpoint:
      dtype = self.draft_dtype or self.dtype
      fixed['model'] = Model(checkpoint=checkpoint, dtype=dtype)
    if 'ngram_text' in options_of(choice):
      fixed['ngram_text'] = str(folder / NGRAM_TEXT)
    return parsed('drafter', DRAFTERS, kind, **fixed)


def parsed(
  kind: str, known: Mapping[str, type], text: str, **fixed: Any
) -> Any:
  """Makes a choice of NAME+SWITCH+OPTION:VALUE; what it says precedes `fixed`.
  ValueError for options that the choice lacks, or that `--gammas` replaces."""
  name, *parts = text.split('+')
  choice = by_name(kind, known, name)
  options = {k: v for k, v in options_of(choice).items() if k != 'gamma'}
  for part in parts:
    key, _, value = part.partition(':')
    field = by_name(f'option of {name}', options, key)
    read = field.metadata['type'] or type(field.default)
    try:
      fixed[key] = True if read is bool and not value else read(value)
    except argparse.ArgumentTypeError as error:
      raise ValueError(f'{kind} {text}: {key} {error}') from error
  return choice(**fixed)
