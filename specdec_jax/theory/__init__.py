"""What the papers' formulas promise, in numpy alone.

Nothing here imports the rest of the package or jax, so that a plan can be made,
and a measurement judged, on a machine that has neither.
"""

from specdec_jax.theory.acceptance import (
  acceptance_rate,
  alpha_from_block_efficiency,
  expected_runs,
  expected_tokens,
  expected_tokens_of_profile,
)
from specdec_jax.theory.speedup import (
  best_gamma,
  operations_factor,
  predicted_speedup,
  walltime_improvement,
)

__all__ = [
  'acceptance_rate',
  'alpha_from_block_efficiency',
  'best_gamma',
  'expected_runs',
  'expected_tokens',
  'expected_tokens_of_profile',
  'operations_factor',
  'predicted_speedup',
  'walltime_improvement',
]
