"""How often loops run whose length depends on the data."""

import math

from specdec_jax.models import loop_names
from specdec_jax.models.loop_names import CacheBlocks, ChosenExperts
from specdec_jax.theory.experts import expected_most


def trip_count(metadata: str, *, context: float = math.inf) -> float | None:
  """Returns how often the body of a loop runs on average, None if unknown.

  Args:
    metadata: of the loop in a compiled program.
    context: entries of a cache that the longest row fills; infinity for all.
  """
  loop = loop_names.read(metadata)
  match loop:
    case CacheBlocks():
      # Of a cache of 300 entries, in blocks of 256: twice.
      return math.ceil(min(context, loop.capacity) / loop.block_size)
    case ChosenExperts():
      # The experts of the device that has most of those that are chosen.
      return expected_most(
        loop.num_experts, loop.num_chosen, loop.num_tokens, loop.num_devices
      )
    case None:
      return None
