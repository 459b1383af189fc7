"""The row of `families.FAMILIES` that describes a network to the rest of the
package."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import flax.linen as nn

from specdec_jax.base import Array, LanguageModel
from specdec_jax.models.networks import Bound
from specdec_jax.models.products import Weights


class Drafts(NamedTuple):
  """The purpose of a network that only drafts.

  Attributes:
    drafter: the drafter that uses it, by its name in `assembly`.
    bind: `(target, config, width=) -> Bound`: binds the network to a target,
      the target's `Network`, which then stores the features that the network
      reads at the first `width` tokens of a call.
  """

  drafter: str
  bind: Callable[..., Bound]


class Family(NamedTuple):
  """Networks of one architecture. The first argument of callables is a config.

  Attributes:
    name: the network's name in model.json.
    config: the frozen dataclass of its sizes, with a field `dtype`; those of
      whole models also have `vocab_size` and `is_tied`.
    stacks: the fields of `config` that count layers, the decoder's last, each
      with the branch of the parameters that has these layers as `layers_0`,
      `layers_1` ...; `''` is the tree itself.
    has_equal_layers: whether the layers of a stack have parameters of the same
      names and shapes.
    module: the network, as `Network` describes it; None for a family without
      one, whose residual streams cannot be kept.
    init_params: `(config, rng_key)` to fresh float32 parameters; None to make
      them from `module`.
    language_model: the functions that decoding calls; None to make them from
      `module`.
    drafts: the purpose of a network that only drafts; None for a whole model.
    has_encoder: whether prompts go to an encoder.
    starts: tokens that the decoder starts with, before any prompt.
    adds_special_tokens: whether prompts are encoded with the vocabulary's
      special tokens, such as the end of text that an encoder expects.
    max_positions: the longest context of each stack; None without a limit.
    has_vocabulary: whether there is an embedding for each token.
    has_sentinels: whether sentinels may follow the pieces of a SentencePiece
      vocabulary, as in T5.
    has_spare_rows: whether any number of embeddings may have no token, rather
      than a little padding.
    check_params: `(config, params)`; raises ValueError for values that no
      network of these sizes has, such as token ids out of range.
  """

  name: str
  config: type
  stacks: Mapping[str, str] = {}
  has_equal_layers: bool = True
  module: type[nn.Module] | None = None
  init_params: Callable[[Any, Array], Weights] | None = None
  language_model: Callable[[Any], LanguageModel] | None = None
  drafts: Drafts | None = None
  has_encoder: Callable[[Any], bool] = lambda config: False
  starts: tuple[int, ...] = ()
  adds_special_tokens: Callable[[Any], bool] = lambda config: True
  max_positions: Callable[[Any], int | None] = lambda config: None
  has_vocabulary: bool = True
  has_sentinels: bool = False
  has_spare_rows: bool = True
  check_params: Callable[[Any, Any], None] = lambda config, params: None
