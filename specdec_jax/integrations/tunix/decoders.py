"""Decoders of Tunix's models in memory, for `generate` and `stream`."""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from tunix.generate.tokenizer_adapter import TokenizerAdapter

from specdec_jax.assembly import api
from specdec_jax.assembly.decoder import Decoder
from specdec_jax.assembly.drafters import DrafterChoice
from specdec_jax.assembly.models import Model
from specdec_jax.assembly.rules import Rule
from specdec_jax.base import Params
from specdec_jax.integrations.tunix import networks
from specdec_jax.models import layers
from specdec_jax.models.families import Config
from specdec_jax.models.layers import Weights
from specdec_jax.text import vocabularies


@dataclasses.dataclass(frozen=True, kw_only=True)
class TunixVocabulary:
  """A tokenizer of Tunix's as a vocabulary of a model with so many logits, all
  of which may be drawn, as Tunix draws them."""

  tokenizer: Any
  vocab_size: int
  eos_ids: tuple[int, ...]
  chat_template: None = None
  encode_chat = vocabularies.encode_chat
  pieces = vocabularies.text_pieces

  @property
  def special_ids(self) -> frozenset[int]:
    return frozenset(self.eos_ids)

  def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
    """Encodes a text as Tunix's sampler does, with one BOS in front if the
    tokenizer has one, or with none."""
    ids, bos = list(self.tokenizer.encode(text)), self.tokenizer.bos_id()
    # Tunix takes an id of 0 for none.
    if add_special_tokens:
      ids = self.tokenizer.dedup_bos_ids([*([bos] if bos else []), *ids])
    elif bos and ids[:1] == [bos]:
      ids = ids[1:]
    return [int(i) for i in ids]

  def decode(self, ids: Sequence[int], *, keep_special: bool = False) -> str:
    """Decodes ids; whether special ones have text is the tokenizer's choice."""
    text: str = self.tokenizer.decode([int(i) for i in ids])
    return text

  def id_to_text(self, token_id: int) -> str:
    """Returns the text of a token."""
    return self.decode([token_id])


def load(
  model: nnx.Module,
  tokenizer: Any,
  *,
  drafter: str | DrafterChoice | None = None,
  draft_model: nnx.Module | None = None,
  verification: str | Rule = 'speculative_sampling',
  dtype: Any = None,
  **options: Any,
) -> Decoder:
  """Makes a decoder of a Tunix model, which stays as it is.

  Weights are those that the model has now, with copies of the kernels whose
  shapes differ. For what is not said here, and for `options`, which say how to
  sample too, see `specdec_jax.load`.

  Args:
    model: see `networks.config_of`.
    tokenizer: any that Tunix takes.
    drafter: None for 'model' with a draft model, 'suffix' without one.
    draft_model: another Tunix model, of the same tokenizer.
    dtype: of weights, activations and caches; None for the model's own.

  Raises ValueError if a model is none of those, or the choices do not fit.
  """
  tokenizer = TokenizerAdapter(getattr(tokenizer, 'tokenizer', tokenizer))
  config = networks.config_of(model, dtype)
  params: Weights = weights(model, config)
  own: Any = ()
  draft = None
  if draft_model is not None:
    sizes = networks.config_of(draft_model, dtype)
    draft = Model(checkpoint='draft_model', sizes=sizes)
    own = weights(draft_model, sizes)
    drafter = drafter or 'model'
  vocabulary: Any = TunixVocabulary(
    tokenizer=tokenizer,
    vocab_size=config.vocab_size,
    eos_ids=(int(tokenizer.eos_id()),),
  )
  made = api.of_network(
    'model',
    config,
    vocabulary,
    drafter=drafter or 'suffix',
    draft=draft,
    verification=verification,
    options=options,
  )
  joined = Params(target=params, drafter=made.drafting.join(params, own))
  return dataclasses.replace(made, params=joined)


def weights(model: nnx.Module, config: Config) -> Weights:
  """Reads the weights as a decoder of these sizes takes them."""
  cast = functools.partial(jnp.asarray, dtype=config.dtype)
  arrays = jax.tree.map(cast, networks.arrays_of(model))
  return layers.with_cpu_copies(arrays, is_tied=config.is_tied)
