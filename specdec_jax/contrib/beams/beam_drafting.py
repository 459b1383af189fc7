"""Drafters of beam search: of the choices that other decoding has."""

from specdec_jax.assembly import models, settled_gamma
from specdec_jax.assembly.decoder import Decoder
from specdec_jax.assembly.drafters import NoDrafter, PromptLookup
from specdec_jax.assembly.drafters.draft_model import DraftModel, networks
from specdec_jax.assembly.lengths import Fixed
from specdec_jax.contrib.beams import beam_drafters as beams
from specdec_jax.contrib.beams.beam_trie import BeamDrafter

_CHOICES = NoDrafter | PromptLookup | DraftModel


def settled(decoder: Decoder, width: int | None) -> Decoder:
  """Returns a decoder with a fixed gamma. One that was not given is that of
  beams without drafts, unless drafts have a width."""
  # Drafters that beams cannot use take their gamma here, and are refused later.
  is_drafted = width is not None or not isinstance(
    decoder.recipe.drafter, _CHOICES
  )
  return settled_gamma.unmeasured(decoder, drafts=is_drafted)


def drafter(
  decoder: Decoder, num_beams: int, width: int | None = None
) -> BeamDrafter:
  """Makes what drafts for K beams from the decoder's choice, if that is a draft
  model with levels of `width` nodes, None for 2 K. ValueError if the choice
  drafts no beams, or not so many."""
  choice, length = decoder.recipe.drafter, decoder.recipe.length
  if not isinstance(choice, _CHOICES):
    raise ValueError(
      f'beam search takes no {type(choice).__name__}: leave it out, or take '
      'drafts of a model or of prompt_lookup'
    )
  # Depths of a trie are static, and all K beams are drafted at once.
  if not isinstance(length, Fixed) or decoder.is_auto:
    asked = decoder.auto or length
    raise ValueError(f'drafts of beams take gamma as a number, not {asked}')
  if width is not None and not isinstance(choice, DraftModel):
    raise ValueError(f'draft_width {width} is not for {type(choice).__name__}')
  if width is not None and width < num_beams:
    raise ValueError(
      f'draft_width {width} is below num_decodes {num_beams}: raise it'
    )
  if isinstance(choice, NoDrafter):
    return beams.none(num_beams)
  if isinstance(choice, PromptLookup):
    return beams.copied(
      num_beams,
      gamma=length.gamma,
      max_ngram=choice.max_ngram,
      min_ngram=choice.min_ngram,
    )
  config = models.read_config(choice.model)
  network, _ = networks(choice.model, config, decoder.parts.target_info)
  return beams.of_model(
    network,
    gamma=length.gamma,
    width=2 * num_beams if width is None else width,
    eos_id=decoder.method.eos_id,
    vocab_size=decoder.parts.target_info.vocab_size,
  )
