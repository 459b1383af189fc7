"""Counts of a text, as a choice."""

import dataclasses

from specdec_jax.assembly import lengths
from specdec_jax.assembly.drafters.choice import Drafting, Target
from specdec_jax.assembly.option_fields import option
from specdec_jax.contrib.ngram import ngram_counts
from specdec_jax.contrib.ngram.drafter import ngram
from specdec_jax.text import text_files


@dataclasses.dataclass(frozen=True, kw_only=True)
class NGram:
  """Counts a text file; see `contrib.ngram.drafter`.

  Draws from the counts where the target is sampled, and drafts their likeliest
  token where it is greedy.
  """

  ngram_text: str = option('', 'the text file that ngram counts')
  gamma: lengths.Gamma | None = lengths.gamma_option()

  def __post_init__(self):
    if not self.ngram_text:
      raise ValueError('drafter ngram needs ngram_text, the file to count')

  @property
  def length(self) -> lengths.LengthChoice:
    return lengths.of(gamma=self.gamma)

  def make(self, target: Target, length: lengths.Length) -> Drafting:
    if target.vocabulary is None:
      raise ValueError('a dry run counts no text: leave the n-gram drafter out')
    tokens = text_files.tokens_of_file(
      self.ngram_text, target.vocabulary, option='ngram_text'
    )
    sampling = target.sampling
    drafter = ngram(
      ngram_counts.estimate(tokens, vocab_size=target.config.vocab_size),
      gamma=lengths.fixed(length),
      logits_to_probs=(
        None if sampling.is_greedy else sampling.to_probs(target.vocab_size)
      ),
    )
    return Drafting(drafter=drafter)
