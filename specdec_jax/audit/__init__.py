"""Tests whether any engine's sampler follows its model, in numpy and scipy."""

from specdec_jax.audit.auditing import audit
from specdec_jax.audit.report import Report

__all__ = ['Report', 'audit']
