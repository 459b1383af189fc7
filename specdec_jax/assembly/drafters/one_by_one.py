"""Drafters of networks that draft token after token, of any length."""

import dataclasses
from typing import ClassVar

import numpy as np

from specdec_jax import drafters
from specdec_jax.assembly import lengths
from specdec_jax.assembly.drafters.choice import Target
from specdec_jax.assembly.sampling import Sampling
from specdec_jax.base import Drafter, LanguageModel, Tree
from specdec_jax.drafters.autoregressive import Chain
from specdec_jax.drafters.schedules import Schedule
from specdec_jax.sampling import logits


@dataclasses.dataclass(frozen=True, kw_only=True)
class OneByOne:
  """How much a network drafts, for the choices of such networks.

  With a `schedule`, or with `min_prob`, gamma is the most that is drafted; see
  `drafters.adaptive`. With a `tree` it is the depth; see `drafters.branching`
  and `lengths.of`.
  """

  gamma: lengths.Gamma | None = lengths.gamma_option()
  tree: lengths.Shape | None = lengths.tree_option()
  schedule: Schedule | None = None
  min_prob: float = 0.0

  tried: ClassVar[tuple[int, ...]] = (1, 3, 7)

  @property
  def length(self) -> lengths.Length:
    return lengths.of(
      gamma=self.gamma,
      tree=self.tree,
      schedule=self.schedule,
      min_prob=self.min_prob,
      tried=self.tried,
    )


def drafter(
  model: LanguageModel | Chain,
  target: Target,
  length: lengths.Length,
  *,
  first: Drafter | None = None,
  few: tuple[LanguageModel, np.ndarray] | None = None,
) -> Drafter:
  """Makes the drafter of a network, as for `drafters.autoregressive`.

  `first` is a drafter of the same gamma that is asked before the model, for a
  length that is no tree; `few` is the model with logits of a draft vocabulary
  alone, and its tokens, for greedy drafts of a fixed gamma.
  """
  sampling, vocab_size = target.sampling, target.vocab_size
  to_probs = sampling.to_probs(vocab_size)
  if isinstance(length, Tree):
    if sampling.is_greedy:
      # Ranks of children need probabilities, not only the likeliest token.
      to_probs = Sampling(temperature=1.0).to_probs(vocab_size)
    return drafters.branching(
      model, tree=length, logits_to_probs=to_probs, is_ranked=sampling.is_greedy
    )
  if sampling.is_greedy:
    # The drafter takes the argmax of logits: of one-hot probabilities it would
    # take the argmax a second time.
    rule_out = logits.mask_padding(vocab_size)
    to_probs = lambda logits, sampling: rule_out(logits)
  if not isinstance(length, lengths.Adaptive):
    length = lengths.Adaptive(lengths.fixed(length))
    # With `first`, whether the model drafts varies by row, as in an adaptive
    # draft.
    if first is None:
      chosen, token_ids = few if few and sampling.is_greedy else (model, None)
      return drafters.autoregressive(
        chosen,
        gamma=length.gamma,
        logits_to_probs=to_probs,
        is_argmax=sampling.is_greedy,
        token_ids=token_ids,
      )
  return drafters.adaptive(
    model,
    gamma=length.gamma,
    logits_to_probs=to_probs,
    is_argmax=sampling.is_greedy,
    schedule=length.schedule,
    min_prob=length.min_prob,
    first=first,
  )
