"""What the papers' formulas promise, in numpy alone.

Nothing here imports the rest of the package or jax, so that a plan can be made,
and a measurement judged, on a machine that has neither.
"""

from specdec_jax.theory.acceptance import (
  acceptance_rate,
  alpha_from_block_efficiency,
  argmax_acceptance,
  divergence,
  expected_runs,
  expected_tokens,
  expected_tokens_of_profile,
  oracle_tokens,
)
from specdec_jax.theory.speedup import (
  best_gamma,
  memory_reads_factor,
  minimal_improvement,
  operations_factor,
  oracle_walltime_improvement,
  predicted_speedup,
  specdec_time,
  walltime_improvement,
)

__all__ = [
  'acceptance_rate',
  'alpha_from_block_efficiency',
  'argmax_acceptance',
  'best_gamma',
  'divergence',
  'expected_runs',
  'expected_tokens',
  'expected_tokens_of_profile',
  'memory_reads_factor',
  'minimal_improvement',
  'operations_factor',
  'oracle_tokens',
  'oracle_walltime_improvement',
  'predicted_speedup',
  'specdec_time',
  'walltime_improvement',
]
