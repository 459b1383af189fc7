"""A row of the table of drafters, which extras make as well."""

from collections.abc import Callable
from typing import Any, NamedTuple

from specdec_jax.base import Drafter

VOCAB_SIZE = 5


class Row(NamedTuple):
  """A drafter under contract.

  Attributes:
    make: `gamma -> Drafter`.
    make_params: the drafter's params.
    is_one_hot: whether it hands over no probabilities.
    has_constant_length: whether it always proposes gamma tokens.
    is_tree: whether its drafts are trees of gamma nodes.
  """

  make: Callable[[int], Drafter]
  make_params: Callable[[], Any] = tuple
  is_one_hot: bool = False
  has_constant_length: bool = True
  is_tree: bool = False
