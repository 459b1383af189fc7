"""The families of networks: a table that describes every network to the rest
of the package, and functions that look it up by a network's config.

A new network is a module, a row of `FAMILIES`, and tests.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from specdec_jax import lazy
from specdec_jax.base import Array, LanguageModel
from specdec_jax.models import llama, networks, t5
from specdec_jax.models.drafting import (
  assistant,
  block_decoder,
  block_drafter,
  eagle,
)
from specdec_jax.models.drafting.assistant import AssistantConfig
from specdec_jax.models.drafting.block_decoder import BlockDecoderConfig
from specdec_jax.models.drafting.block_layers import BlockDrafterConfig
from specdec_jax.models.drafting.draft_vocabulary import spread
from specdec_jax.models.drafting.eagle import EagleConfig
from specdec_jax.models.family import Drafts, Family
from specdec_jax.models.gemma import decoder as gemma
from specdec_jax.models.gemma import gemma4, t5gemma
from specdec_jax.models.gemma.gemma4 import Gemma4Config
from specdec_jax.models.gemma.layers import GemmaConfig
from specdec_jax.models.gemma.t5gemma import T5GemmaConfig
from specdec_jax.models.llama import LlamaConfig
from specdec_jax.models.networks import Bound, Network
from specdec_jax.models.products import Weights
from specdec_jax.models.t5 import T5Config

# Sizes of a whole model, and of a network that only drafts. An extra may have
# networks of its own that draft, so any dataclass of a row's `config` will do.
Config = LlamaConfig | T5Config | GemmaConfig | T5GemmaConfig | Gemma4Config
DrafterConfig = (
  BlockDecoderConfig | BlockDrafterConfig | EagleConfig | AssistantConfig | Any
)
AnyConfig = Config | DrafterConfig


FAMILIES = (
  Family(
    name='llama',
    config=LlamaConfig,
    stacks={'num_layers': ''},
    module=llama.Llama,
    max_positions=lambda config: config.max_positions,
  ),
  Family(
    name='t5',
    config=T5Config,
    stacks={'num_encoder_layers': 'encoder', 'num_decoder_layers': 'decoder'},
    module=t5.T5,
    has_encoder=lambda config: config.num_encoder_layers > 0,
    starts=(0,),
    adds_special_tokens=lambda config: config.num_encoder_layers > 0,
    has_sentinels=True,
    has_spare_rows=False,
  ),
  Family(
    name='gemma',
    config=GemmaConfig,
    stacks={'num_layers': ''},
    module=gemma.Decoder,
    max_positions=lambda config: config.max_positions,
  ),
  Family(
    name='gemma4',
    config=Gemma4Config,
    stacks={'num_layers': ''},
    has_equal_layers=False,
    module=gemma4.Decoder,
    max_positions=lambda config: config.max_positions,
  ),
  Family(
    name='t5gemma',
    config=T5GemmaConfig,
    stacks={'num_encoder_layers': 'encoder', 'num_decoder_layers': 'decoder'},
    module=t5gemma.T5Gemma,
    has_encoder=lambda config: True,
    starts=(2,),
    max_positions=lambda config: config.max_positions,
  ),
  Family(
    name='block_decoder',
    config=BlockDecoderConfig,
    init_params=block_decoder.init_params,
    stacks={'num_encoder_layers': 'encoder', 'num_decoder_layers': ''},
    drafts=Drafts('spec_drafter', block_decoder.bind),
    has_sentinels=True,
    max_positions=lambda config: config.max_positions,
  ),
  Family(
    name='eagle',
    config=EagleConfig,
    init_params=eagle.init_params,
    drafts=Drafts('eagle', eagle.bind),
    has_vocabulary=False,
    check_params=eagle.check_params,
  ),
  Family(
    name='assistant',
    config=AssistantConfig,
    init_params=assistant.init_params,
    drafts=Drafts('assistant', assistant.bind),
    has_vocabulary=False,
    check_params=assistant.check_params,
  ),
  Family(
    name='block_drafter',
    config=BlockDrafterConfig,
    init_params=block_drafter.init_params,
    drafts=Drafts('block', block_drafter.bind),
    has_vocabulary=False,
    check_params=block_drafter.check_params,
  ),
  *lazy.installed('specdec_jax.contrib.block_heads.network:FAMILY'),
)


def of(config: AnyConfig) -> Family:
  """Looks up the family of a config; ValueError if there is none."""
  # The exact class: a subclass would be another network.
  for family in FAMILIES:
    if type(config) is family.config:
      return family
  raise ValueError(
    f'a {type(config).__name__} has no family: add it to FAMILIES'
  )


def has_encoder(config: AnyConfig) -> bool:
  """Tells whether prompts go to an encoder."""
  return of(config).has_encoder(config)


def only_drafts(config: AnyConfig) -> bool:
  """Tells whether a network only drafts and is no language model itself."""
  return of(config).drafts is not None


def drafts_for(config: AnyConfig) -> str | None:
  """Names the drafter that a network is for; None for a whole model."""
  drafts = of(config).drafts
  return drafts and drafts.drafter


def init_params(config: AnyConfig, rng_key: Array) -> Weights:
  """Initialises float32 parameters."""
  family_init = of(config).init_params
  if family_init is not None:
    return family_init(config, rng_key)
  return networks.init_params(network(config), rng_key)


def language_model(config: AnyConfig) -> LanguageModel:
  """Makes the functions that decoding calls; ValueError if a network only
  drafts."""
  # A family's own functions take precedence over those of its network.
  family = of(config)
  if family.language_model is not None:
    return family.language_model(config)
  return networks.language_model(network(config))


def network(config: AnyConfig) -> Network:
  """Makes a model's `Network`; ValueError if its family has no module."""
  family = of(config)
  if family.module is None:
    reason = 'has no streams that a drafter could read'
    if family.drafts is not None:
      reason = 'only drafts and is no language model'
    raise ValueError(f'a {family.name} {reason}: use another model')
  return Network(
    module=family.module(config),
    config=config,
    num_layers=num_layers(config)[-1],
    has_encoder=family.has_encoder(config),
  )


def bind(target: AnyConfig, config: AnyConfig, *, width: int) -> Bound:
  """Binds a network that only drafts to a target, both given by their sizes.

  The target then keeps what the network reads at the first `width` tokens of a
  call. Raises ValueError if the two do not fit.
  """
  family = of(config)
  if family.drafts is None:
    raise ValueError(
      f'a {family.name} is a whole model: use one that only drafts'
    )
  return family.drafts.bind(network(target), config, width=width)


def num_layers(config: AnyConfig) -> tuple[int, ...]:
  """Counts the layers of each stack, the encoder's first."""
  # A T5 without an encoder has 0 layers there, which are left out.
  counts = [getattr(config, field) for field in of(config).stacks]
  return tuple(count for count in counts if count)


def param_shapes(config: AnyConfig, dtype: jnp.dtype | None = None) -> Weights:
  """Returns the parameters as `jax.ShapeDtypeStruct`s, without computing them.
  Integers keep their dtype; all others have `dtype`, by default the config's.
  """
  # A copy, so that the caller may change its dictionaries.
  return jax.tree.map(lambda leaf: leaf, _traced_shapes(config, dtype))


@functools.lru_cache(maxsize=16)
def _traced_shapes(config: AnyConfig, dtype: jnp.dtype | None) -> Weights:
  family = of(config)
  counts: dict[str, int] = {}
  if family.has_equal_layers:
    counts = {field: getattr(config, field) for field in family.stacks}
  # One of equal layers is traced: that takes 30 ms.
  one_each: Any = {field: min(count, 1) for field, count in counts.items()}
  short = dataclasses.replace(config, **one_each)
  init = functools.partial(init_params, short)
  with networks.only_shapes():
    shapes = jax.eval_shape(init, jax.random.key(0))
  for field, count in counts.items():
    # The layers of T5's encoder lie in `encoder`, those of a Llama at the top.
    branch = family.stacks[field]
    for i in range(1, count):
      stack = shapes[branch] if branch else shapes
      stack[f'layers_{i}'] = stack['layers_0']
  # Token ids among the parameters stay int32.
  dtype = dtype or config.dtype
  return jax.tree.map(
    lambda leaf: (
      jax.ShapeDtypeStruct(leaf.shape, dtype)
      if jnp.issubdtype(leaf.dtype, jnp.floating)
      else leaf
    ),
    shapes,
  )


def with_logits_of(model: LanguageModel, vocab_size: int) -> LanguageModel:
  """Cuts a model's logits to `[..., vocab_size]`, or fills them with -inf."""
  # A draft model's embeddings may have other padding than its target's; ids
  # that are cut or added are padding and have no probability (invariant 10).
  # Of a target's 5 logits and a draft model's [a, b, c]: [a, b, c, -inf, -inf].
  num_missing = vocab_size - model.vocab_size
  if not num_missing:
    return model

  def extend(params, *args: Any, **options: Any) -> tuple[Array, Any]:
    logits, cache = model.extend(params, *args, **options)
    if num_missing < 0:
      return logits[..., :vocab_size], cache
    padding = ((0, 0), (0, 0), (0, num_missing))
    return jnp.pad(logits, padding, constant_values=-jnp.inf), cache

  return model._replace(extend=extend, vocab_size=vocab_size)


def with_draft_vocabulary(
  model: LanguageModel, ids: np.ndarray, vocab_size: int
) -> tuple[LanguageModel, LanguageModel]:
  """Returns the model with logits of the tokens `ids`, `[N]`, alone, and the
  model with these logits spread over `[..., vocab_size]`. Both take the
  parameters of `draft_vocabulary.with_logits_of`."""
  few = model._replace(vocab_size=ids.size)

  def extend(params, *args: Any, **options: Any) -> tuple[Array, Any]:
    logits, cache = model.extend(params, *args, **options)
    return spread(logits, ids, vocab_size), cache

  return few, model._replace(extend=extend, vocab_size=vocab_size)
