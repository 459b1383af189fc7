"""Does a sampler follow its model? Tests for any engine, in numpy and scipy."""

from specdec_jax.audit.auditing import audit
from specdec_jax.audit.report import Report

__all__ = ['Report', 'audit']
