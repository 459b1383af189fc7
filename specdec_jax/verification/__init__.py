"""Rules that accept a prefix of a draft, each one pure function."""

from specdec_jax.verification.block import block_verification
from specdec_jax.verification.greedy import greedy
from specdec_jax.verification.speculative_sampling import speculative_sampling
from specdec_jax.verification.top_beta import top_beta

__all__ = [
  'block_verification',
  'greedy',
  'speculative_sampling',
  'top_beta',
]
