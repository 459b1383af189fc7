"""Copies from earlier outputs and from the context, as a choice."""

import dataclasses
import functools

from specdec_jax import drafters
from specdec_jax.assembly import lengths
from specdec_jax.assembly.drafters.choice import Drafting, Target
from specdec_jax.assembly.option_fields import option
from specdec_jax.drafters import text_pool
from specdec_jax.launch.numbers import positive_int
from specdec_jax.text import text_files


@dataclasses.dataclass(frozen=True, kw_only=True)
class Suffix:
  """Copies from the context, and from earlier texts: `suffix_text`, what
  `Decoder.remember` is given, and in `infer` the chunks before; see
  `drafters.suffix`."""

  gamma: lengths.Gamma | None = lengths.gamma_option()
  suffix_text: str = option('', 'a text file that suffix copies from as well')
  pool_size: int = option(
    2**17, 'the last tokens that suffix keeps of all texts', type=positive_int
  )

  @property
  def length(self) -> lengths.LengthChoice:
    return lengths.of(gamma=self.gamma, usual=8, tried=(3, 11, 23))

  def make(self, target: Target, length: lengths.Length) -> Drafting:
    # Made when it is asked for: decoders of other gammas share the first one's.
    @functools.cache
    def pool() -> drafters.Pool:
      empty, path = text_pool.empty(self.pool_size), self.suffix_text
      # A dry run has no vocabulary, and reads nothing.
      if not path or target.vocabulary is None:
        return empty
      text = text_files.tokens_of_file(
        path, target.vocabulary, option='suffix_text'
      )
      if text.max(initial=0) >= target.vocab_size:
        raise ValueError(f'suffix_text {path} has tokens that the model lacks')
      return text_pool.remember(empty, [text.tolist()])

    drafter = drafters.suffix(gamma=lengths.fixed(length))
    return Drafting(drafter=drafter, join=lambda *params: pool())
