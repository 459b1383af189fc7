"""Rows of the core's tables of tests that are about these heads."""

import jax

from specdec_jax.base import Params
from specdec_jax.contrib.block_heads.blockwise_heads import blockwise_heads
from specdec_jax.contrib.block_heads.network import BlockHeadsConfig
from specdec_jax.models import families
from tests.contracts.table_of_models import NETWORKS, start

FAMILIES = {'block_heads': BlockHeadsConfig(embed_dim=8, gamma=3, mlp_dim=4)}
DRAFTER_OPTIONS = {'block_heads': {'gamma': 2}}
CONVERTED = {'heads': BlockHeadsConfig(embed_dim=8, gamma=3, mlp_dim=16)}


def heads_pair(name: str, gamma: int) -> tuple:
  """Blockwise heads of the width of a target, and both sides' params."""
  config, params = NETWORKS[name][0], start(name)[1]
  sizes = BlockHeadsConfig(embed_dim=config.embed_dim, gamma=gamma, mlp_dim=4)
  bound = families.bind(config, sizes, width=gamma + 1)
  # The same heads with any default of keys: of others, no draft may be right.
  rng_key = jax.random.key(3, impl='threefry2x32')
  own = families.of(sizes).init_params(sizes, rng_key)
  drafter = blockwise_heads(bound.model, gamma=gamma)
  return bound.target, drafter, Params(params, bound.join(params, own))
