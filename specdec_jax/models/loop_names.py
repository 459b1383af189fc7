"""Names of loops that run as often as the data asks for.

A compiled program does not say how often such a loop runs. So its scope is
named after the sizes that decide it, and whoever reads the program, such as
`planning`, gets them back from the name.
"""

import re
from typing import NamedTuple


class CacheBlocks(NamedTuple):
  """A loop of `attention.attend` over the blocks of a cache up to the last
  entry that any row uses: the entries of a block and of the cache."""

  block_size: int
  capacity: int

  @property
  def scope(self) -> str:
    return f'blocks_of_{self.block_size}_in_{self.capacity}'


class ChosenExperts(NamedTuple):
  """A loop of `models.experts` over the experts that tokens are routed to: the
  experts of a token, and the number of experts, of tokens, and of devices that
  the experts are divided among."""

  num_chosen: int
  num_experts: int
  num_tokens: int
  num_devices: int = 1

  @property
  def scope(self) -> str:
    scope = f'experts_{self.num_chosen}_of_{self.num_experts}'
    scope += f'_for_{self.num_tokens}'
    if self.num_devices > 1:
      scope += f'_on_{self.num_devices}'
    return scope


_CACHE_BLOCKS = re.compile(r'blocks_of_(\d+)_in_(\d+)/while"')
_EXPERTS = re.compile(r'experts_(\d+)_of_(\d+)_for_(\d+)(?:_on_(\d+))?/while"')


def read(metadata: str) -> CacheBlocks | ChosenExperts | None:
  """Returns what a `while` of a compiled program loops over, from its metadata,
  such as `op_name="jit(f)/blocks_of_256_in_700/while"`; None for other loops.
  """
  if match := _CACHE_BLOCKS.search(metadata):
    return CacheBlocks(*map(int, match.groups()))
  if match := _EXPERTS.search(metadata):
    return ChosenExperts(*map(int, match.groups('1')))
  return None
