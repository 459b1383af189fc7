"""Decoders of Tunix's models in memory, for `generate` and `stream`."""

import dataclasses
import functools
import os
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from tunix.generate.tokenizer_adapter import TokenizerAdapter

from specdec_jax.assembly import api, models
from specdec_jax.assembly.decoder import Decoder
from specdec_jax.assembly.drafters import DrafterChoice
from specdec_jax.assembly.models import Model
from specdec_jax.assembly.rules import Rule
from specdec_jax.base import Params
from specdec_jax.integrations.tunix import meshes, networks
from specdec_jax.models import products
from specdec_jax.models.families import Config
from specdec_jax.models.products import Weights
from specdec_jax.text import vocabularies


@dataclasses.dataclass(frozen=True, kw_only=True)
class TunixVocabulary:
  """A tokenizer of Tunix as the vocabulary of a model. It has a token for each
  of the model's logits, since Tunix may draw any of them."""

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
    """Encodes a text as Tunix's sampler does: with one BOS in front if the
    tokenizer has one, or without BOS."""
    ids = list(self.tokenizer.encode(text))
    bos = self.tokenizer.bos_id()
    # In Tunix, an id of 0 means that there is no BOS.
    if add_special_tokens:
      ids = self.tokenizer.dedup_bos_ids([*([bos] if bos else []), *ids])
    elif bos and ids[:1] == [bos]:
      ids = ids[1:]
    return [int(i) for i in ids]

  def decode(self, ids: Sequence[int], *, keep_special: bool = False) -> str:
    """Decodes ids; the tokenizer decides whether special tokens have text."""
    return str(self.tokenizer.decode([int(i) for i in ids]))

  def id_to_text(self, token_id: int) -> str:
    """Returns the text of a token."""
    return self.decode([token_id])

  def tokens(self) -> list[str]:
    """Lists the token of each id, to compare with a draft model's."""
    if not hasattr(self.tokenizer, 'get_vocab'):
      raise ValueError(
        'a draft model with a vocabulary in its folder needs a tokenizer that '
        'lists its tokens, as those of transformers do'
      )
    return vocabularies.Vocabulary(tokenizer=self.tokenizer).tokens()


def load(
  model: nnx.Module,
  tokenizer: Any,
  *,
  drafter: str | DrafterChoice | None = None,
  draft_model: nnx.Module | str | os.PathLike[str] | None = None,
  verification: str | Rule = 'speculative_sampling',
  dtype: Any = None,
  **options: Any,
) -> Decoder:
  """Returns a decoder of a Tunix model, which is not changed.

  The decoder has the model's current weights, and copies of the kernels whose
  shapes differ. For the other arguments and `options`, which include the
  sampling options, see `specdec_jax.load`.

  Args:
    model: see `networks.config_of`.
    tokenizer: any that Tunix accepts.
    drafter: by default the one of the draft model, or 'suffix' without one.
    draft_model: another Tunix model with the same tokenizer; or weights in a
      file, such as an EAGLE-3 network, named as for `specdec_jax.load`.
    dtype: of weights, activations and caches; by default the model's.

  Raises ValueError if a model is not supported, or options do not fit.
  """
  tokenizer = TokenizerAdapter(getattr(tokenizer, 'tokenizer', tokenizer))
  config = networks.config_of(model, dtype)
  params = weights(model, config)
  draft, draft_params = _draft(draft_model, config, dtype)
  if not drafter and draft_params:
    drafter = 'model'
  elif not drafter and not draft:
    drafter = 'suffix'
  vocabulary: Any = TunixVocabulary(
    tokenizer=tokenizer,
    vocab_size=config.vocab_size,
    eos_ids=(int(tokenizer.eos_id()),),
  )
  decoder = api.of_network(
    'model',
    config,
    vocabulary,
    drafter=drafter,
    draft=draft,
    verification=verification,
    options=options,
  )
  parts = decoder.parts
  drafting = parts.drafting
  if drafting.model and drafting.config and not draft_params:
    draft_params = models.read_params(drafting.model, drafting.config)
    sharding = meshes.replicated(meshes.of(model))
    draft_params = jax.device_put(draft_params, sharding)
  # When the policy's weights change, those of the drafter stay.
  join = lambda target, _: drafting.join(target, draft_params)
  return dataclasses.replace(
    decoder,
    parts=dataclasses.replace(
      parts, drafting=dataclasses.replace(drafting, join=join)
    ),
    params=Params(target=params, drafter=join(params, ())),
  )


def _draft(
  model: nnx.Module | str | os.PathLike[str] | None, target: Config, dtype: Any
) -> tuple[Model | None, Weights]:
  """Returns the description of a draft model, and its weights if it is in
  memory."""
  if model is None:
    return None, {}
  if not isinstance(model, nnx.Module):
    return Model(checkpoint=os.fspath(model), dtype=target.dtype.name), {}
  sizes = networks.config_of(model, dtype)
  return Model(checkpoint='draft_model', sizes=sizes), weights(model, sizes)


def weights(model: nnx.Module, config: Config) -> Weights:
  """Returns a model's weights as a decoder with this config needs them."""
  cast = functools.partial(jnp.asarray, dtype=config.dtype)
  arrays = jax.tree.map(cast, networks.arrays_of(model))
  return products.with_cpu_copies(arrays, is_tied=config.is_tied)
