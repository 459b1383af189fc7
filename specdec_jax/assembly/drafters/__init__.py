"""Drafters as choices, for flags, gin files, T5X and Python alike: one file per
choice, and the table of their names."""

from typing import Any

from specdec_jax.assembly.drafters.choice import DrafterChoice
from specdec_jax.assembly.drafters.draft_model import DraftModel
from specdec_jax.assembly.drafters.none import NoDrafter
from specdec_jax.assembly.drafters.prompt_lookup import PromptLookup
from specdec_jax.lazy import LazyTable

__all__ = [
  'DRAFTERS',
  'DraftModel',
  'DrafterChoice',
  'NoDrafter',
  'PromptLookup',
  'shown',
]

_HERE = 'specdec_jax.assembly.drafters'
_CONTRIB = 'specdec_jax.contrib'

# In the order in which help texts and refusals list them.
DRAFTERS: LazyTable[type[DrafterChoice]] = LazyTable(
  {
    'prompt_lookup': f'{_HERE}.prompt_lookup:PromptLookup',
    'suffix': f'{_HERE}.suffix:Suffix',
    'ngram': f'{_CONTRIB}.ngram.choice:NGram',
    'uniform': f'{_HERE}.uniform:Uniform',
    'model': f'{_HERE}.draft_model:DraftModel',
    'quantized': f'{_HERE}.quantized:Quantized',
    'eagle': f'{_HERE}.eagle:Eagle',
    'assistant': f'{_HERE}.assistant:Assistant',
    'block': f'{_HERE}.block:Block',
    'spec_drafter': f'{_HERE}.spec_drafter:SpecDrafter',
    'block_heads': f'{_CONTRIB}.block_heads.choice:BlockHeads',
    'grammar': f'{_HERE}.grammar:GrammarDrafter',
    'none': f'{_HERE}.none:NoDrafter',
  }
)


def __getattr__(name: str) -> Any:
  """Finds a choice by the name of its class, as gin files write it."""
  for choice in DRAFTERS.values():
    if choice.__name__ == name:
      return choice
  raise AttributeError(f'module {__name__!r} has no attribute {name!r}')


def shown(choice: DrafterChoice) -> str:
  """Names a choice, for reports: by its weights, if it has any."""
  model = getattr(choice, 'model', None)
  if model is not None:
    return model.checkpoint
  names = {choice_class: name for name, choice_class in DRAFTERS.items()}
  return names.get(type(choice), type(choice).__name__)
