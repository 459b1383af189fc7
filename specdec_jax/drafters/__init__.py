"""Sources of guesses, each a pair of pure functions."""

from specdec_jax.drafters.autoregressive import autoregressive
from specdec_jax.drafters.ngram import NGramTable, ngram
from specdec_jax.drafters.prompt_lookup import prompt_lookup
from specdec_jax.drafters.uniform import uniform

__all__ = [
  'NGramTable',
  'autoregressive',
  'ngram',
  'prompt_lookup',
  'uniform',
]
