"""The papers' formulas, in numpy alone.

Nothing here imports jax or the rest of the package, so that one can plan, and
judge measurements, on a machine without them.
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
