"""Drafters: sources of drafts, each a few pure functions (`base.Drafter`)."""

from specdec_jax.drafters.adaptive import adaptive
from specdec_jax.drafters.assistant import AssistantModel, assistant
from specdec_jax.drafters.autoregressive import autoregressive
from specdec_jax.drafters.block import BlockNetwork, block
from specdec_jax.drafters.bounded import within
from specdec_jax.drafters.branching import branching
from specdec_jax.drafters.continuations import continuations
from specdec_jax.drafters.eagle import EagleModel, eagle
from specdec_jax.drafters.prompt_lookup import prompt_lookup
from specdec_jax.drafters.spec_drafter import BlockModel, spec_drafter
from specdec_jax.drafters.stateless import none
from specdec_jax.drafters.suffix import Pool, suffix
from specdec_jax.drafters.uniform import uniform

__all__ = [
  'AssistantModel',
  'BlockModel',
  'BlockNetwork',
  'EagleModel',
  'Pool',
  'adaptive',
  'assistant',
  'autoregressive',
  'block',
  'branching',
  'continuations',
  'eagle',
  'none',
  'prompt_lookup',
  'spec_drafter',
  'suffix',
  'uniform',
  'within',
]
