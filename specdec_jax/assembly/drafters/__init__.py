"""Drafters as choices, for flags, gin files, T5X and Python alike: one file per
choice, and the table of their names."""

from specdec_jax.assembly.drafters.assistant import Assistant
from specdec_jax.assembly.drafters.choice import DrafterChoice
from specdec_jax.assembly.drafters.draft_model import DraftModel
from specdec_jax.assembly.drafters.eagle import Eagle
from specdec_jax.assembly.drafters.grammar import GrammarDrafter
from specdec_jax.assembly.drafters.none import NoDrafter
from specdec_jax.assembly.drafters.prompt_lookup import PromptLookup
from specdec_jax.assembly.drafters.quantized import Quantized
from specdec_jax.assembly.drafters.spec_drafter import SpecDrafter
from specdec_jax.assembly.drafters.suffix import Suffix
from specdec_jax.assembly.drafters.uniform import Uniform
from specdec_jax.contrib.block_heads.choice import BlockHeads
from specdec_jax.contrib.ngram.choice import NGram

# In the order in which help texts and refusals list them.
DRAFTERS: dict[str, type[DrafterChoice]] = {
  'prompt_lookup': PromptLookup,
  'suffix': Suffix,
  'ngram': NGram,
  'uniform': Uniform,
  'model': DraftModel,
  'quantized': Quantized,
  'eagle': Eagle,
  'assistant': Assistant,
  'spec_drafter': SpecDrafter,
  'block_heads': BlockHeads,
  'grammar': GrammarDrafter,
  'none': NoDrafter,
}


def shown(choice: DrafterChoice) -> str:
  """Names a choice, for reports: by its weights, if it has any."""
  if (model := getattr(choice, 'model', None)) is not None:
    return model.checkpoint
  names = {kind: name for name, kind in DRAFTERS.items()}
  return names.get(type(choice), type(choice).__name__)
