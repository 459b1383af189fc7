"""Heads of Medusa (Cai et al., arXiv 2401.10774), as a user would add them:
each guesses one token further ahead from the target's last hidden state."""

import dataclasses
from typing import Any

import flax.linen as nn
import jax.numpy as jnp

from specdec_jax import arrays
from specdec_jax.assembly import lengths, models
from specdec_jax.assembly.drafters.choice import Drafting, Target
from specdec_jax.assembly.lengths import Gamma, Length, LengthChoice
from specdec_jax.assembly.models import Model
from specdec_jax.base import Array, Draft, Drafter
from specdec_jax.drafters import features
from specdec_jax.models import families, taps
from specdec_jax.models.families import Drafts, Family
from specdec_jax.models.layers import Dense, applied
from specdec_jax.models.networks import Bound, Network


@dataclasses.dataclass(frozen=True, kw_only=True)
class MedusaConfig:
  """Sizes of `num_heads` heads for a target of this width and vocabulary."""

  vocab_size: int
  embed_dim: int
  num_heads: int
  dtype: jnp.dtype = jnp.float32


class Medusa(nn.Module):
  """`[B, embed]` to float32 logits `[B, num_heads, V]`."""

  config: MedusaConfig

  @nn.compact
  def __call__(self, x: Array) -> Array:
    config, logits = self.config, []
    for i in range(config.num_heads):
      block = Dense(config.embed_dim, config.dtype, name=f'block_{i}')
      head = Dense(config.vocab_size, name=f'logits_{i}')
      logits.append(head(x + nn.silu(block(x))))
    return jnp.stack(logits, axis=1)


def init_params(config: MedusaConfig, rng_key: Array) -> Any:
  x = jnp.zeros((1, config.embed_dim), config.dtype)
  return Medusa(config).init(rng_key, x)['params']


def bind(target: Network, config: MedusaConfig, *, width: int) -> Bound:
  keeping = taps.last_call(target, (taps.LAST,), width=width)
  return Bound(model=applied(Medusa(config)), target=keeping)


def drafter(heads: Any, *, gamma: int, vocab_size: int) -> Drafter:
  """Drafts the likeliest token of each of the first `gamma` heads."""

  def init(params, prompt, max_len, target_cache):
    # The loop goes on without the features of the prompt.
    return (), dataclasses.replace(target_cache, prompt=None)

  def propose(params, row_keys, context, state, target_cache):
    x, is_there = features.of_last_read(target_cache, context.lengths)
    tokens = arrays.argmax(heads(params, x)[:, :gamma, :vocab_size])
    num_drafted = jnp.where(is_there, gamma, 0).astype(jnp.int32)
    return Draft(tokens=tokens, probs=None, lengths=num_drafted), state

  return Drafter(
    gamma, init, propose, may_abstain=True, reads_target_cache=True
  )


@dataclasses.dataclass(frozen=True, kw_only=True)
class MedusaHeads:
  """The choice: its fields are the options that users have."""

  model: Model
  gamma: Gamma = lengths.gamma_option(3)

  @property
  def length(self) -> LengthChoice:
    return lengths.of(gamma=self.gamma)

  def make(self, target: Target, length: Length) -> Drafting:
    config = models.read_drafter_config(self.model, 'medusa')
    gamma = lengths.fixed(length)
    bound = families.bind(target.config, config, width=gamma + 1)
    made = drafter(bound.model, gamma=gamma, vocab_size=target.vocab_size)
    return Drafting(
      drafter=made,
      model=self.model,
      config=config,
      target=bound.target,
      join=bound.join,
    )


FAMILY = Family(
  name='medusa',
  config=MedusaConfig,
  init_params=init_params,
  drafts=Drafts('medusa', bind),
  has_vocabulary=False,
)
