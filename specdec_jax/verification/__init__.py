"""Verification rules: pure functions that accept a prefix of a draft or a path
of a tree."""

from specdec_jax.verification.block import block_verification
from specdec_jax.verification.greedy import greedy
from specdec_jax.verification.speculative_sampling import speculative_sampling
from specdec_jax.verification.target_walk import greedy_walk, target_sample_walk
from specdec_jax.verification.traversal import traversal

__all__ = [
  'block_verification',
  'greedy',
  'greedy_walk',
  'speculative_sampling',
  'target_sample_walk',
  'traversal',
]
