"""Sources of guesses, each a pair of pure functions."""

from specdec_jax.drafters.autoregressive import autoregressive
from specdec_jax.drafters.ngram import NGramTable, estimate_ngram, ngram
from specdec_jax.drafters.prompt_lookup import prompt_lookup
from specdec_jax.drafters.uniform import uniform

__all__ = [
  'NGramTable',
  'autoregressive',
  'estimate_ngram',
  'ngram',
  'prompt_lookup',
  'uniform',
]
