"""Drafters of networks that draft token after token, of any length."""

import dataclasses
from typing import ClassVar

import numpy as np

from specdec_jax import drafters
from specdec_jax.assembly import lengths
from specdec_jax.assembly.drafters.choice import Target
from specdec_jax.assembly.option_fields import option
from specdec_jax.assembly.text_settings import TextSettings
from specdec_jax.base import Drafter, LanguageModel, Tree
from specdec_jax.drafters.autoregressive import Chain
from specdec_jax.launch.numbers import share
from specdec_jax.sampling import logits


@dataclasses.dataclass(frozen=True, kw_only=True)
class OneByOne:
  """How much a network drafts, for the choices of such networks.

  With `min_prob`, gamma is the most that is drafted; see `drafters.adaptive`.
  With a `tree` it is the depth; see `drafters.branching` and `lengths.of`.
  """

  gamma: lengths.Gamma | None = lengths.gamma_option()
  tree: lengths.Shape | None = lengths.tree_option()
  min_prob: float = option(
    0.0,
    'end a draft at a token to which the draft model itself gives less '
    'probability than this',
    type=share,
  )

  tried: ClassVar[tuple[int, ...]] = (1, 3, 7)

  @property
  def length(self) -> lengths.LengthChoice:
    if self.tree is not None and self.min_prob:
      raise ValueError('min_prob ends chains, not trees: give one of them')
    return lengths.of(gamma=self.gamma, tree=self.tree, tried=self.tried)


def drafter(
  model: LanguageModel | Chain,
  target: Target,
  length: lengths.Length,
  *,
  min_prob: float = 0.0,
  min_confidence: float = 0.0,
  first: Drafter | None = None,
  few: tuple[LanguageModel, np.ndarray] | None = None,
) -> Drafter:
  """Makes the drafter of a network, as for `drafters.autoregressive`.

  For chains, `min_prob` and `min_confidence` end drafts early, and `first` is a
  drafter of the same gamma that is asked before the model; see
  `drafters.adaptive`. `few` is the model with logits of a draft vocabulary
  alone, and its tokens, for greedy drafts that are all of gamma tokens.
  """
  sampling, vocab_size = target.sampling, target.vocab_size
  to_probs = sampling.to_probs(vocab_size)
  if isinstance(length, Tree):
    if sampling.is_greedy:
      # Ranks of children need probabilities, not only the likeliest token.
      to_probs = TextSettings(temperature=1.0).to_probs(vocab_size)
    return drafters.branching(
      model, tree=length, logits_to_probs=to_probs, is_ranked=sampling.is_greedy
    )
  if sampling.is_greedy:
    # The drafter takes the argmax of logits: of one-hot probabilities it would
    # take the argmax a second time.
    rule_out = logits.mask_padding(vocab_size)
    to_probs = lambda logits, sampling: rule_out(logits)
  gamma = lengths.fixed(length)
  # With `first`, whether the model drafts varies by row, too.
  if min_prob or min_confidence or first is not None:
    return drafters.adaptive(
      model,
      gamma=gamma,
      logits_to_probs=to_probs,
      is_argmax=sampling.is_greedy,
      min_prob=min_prob,
      min_confidence=min_confidence,
      first=first,
    )
  chosen, token_ids = few if few and sampling.is_greedy else (model, None)
  return drafters.autoregressive(
    chosen,
    gamma=gamma,
    logits_to_probs=to_probs,
    is_argmax=sampling.is_greedy,
    token_ids=token_ids,
  )
