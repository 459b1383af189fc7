"""Small decodes that several test files make."""

import functools

import jax
import numpy as np

from specdec_jax import verification
from specdec_jax.base import Params
from specdec_jax.decoding import autoregressive, speculative
from specdec_jax.decoding.method import Method
from specdec_jax.sampling import logits

GREEDY = logits.standardize(temperature=0)
SAMPLED = logits.standardize(temperature=0.9)
RULES = {
  'speculative_sampling': verification.speculative_sampling,
  'block': verification.block_verification,
  'greedy': verification.greedy,
}


def speculate(
  target,
  params: Params,
  drafter,
  prompt,
  *,
  rule='speculative_sampling',
  to_probs=SAMPLED,
  max_len=24,
  eos_id=-1,
  seed=0,
):
  """A speculative decode, compiled whole; the rule is a name or a function."""
  generate = _compiled(
    speculative.generate,
    method=Method(
      target=target,
      drafter=drafter,
      verify_fn=RULES.get(rule, rule),
      logits_to_probs=to_probs,
      eos_id=eos_id,
    ),
    max_len=max_len,
  )
  return generate(params, jax.random.key(seed), prompt)


def plain(
  target, params: Params, prompt, *, to_probs, max_len=24, eos_id=-1, seed=0
):
  """A plain decode, compiled whole."""
  generate = _compiled(
    autoregressive.generate,
    method=Method(target=target, logits_to_probs=to_probs, eos_id=eos_id),
    max_len=max_len,
  )
  return generate(params, jax.random.key(seed), prompt)


@functools.cache
def _compiled(generate, **settings):
  """One program for each way of decoding, whoever asks."""
  return jax.jit(functools.partial(generate, **settings))


def rows(output) -> list[list[int]]:
  """The committed tokens of each row."""
  tokens = np.asarray(output.tokens)
  return [
    row[:length].tolist()
    for row, length in zip(tokens, np.asarray(output.lengths), strict=True)
  ]
