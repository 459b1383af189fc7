"""Rows of the core's tables of tests that are about this rule."""

import functools

from specdec_jax.contrib.top_beta.rule import top_beta

STRICT = functools.partial(top_beta, beta=1)
RULES = {
  'top_beta, strict': STRICT,
  'top_beta': functools.partial(top_beta, beta=3, tau=1.0),
}
# Lossless options, and others that pass through every door, at a temperature.
OPTIONS = {'top_beta': ({'beta': 1}, {'beta': 16, 'tau': 9.0}, 0.0)}
