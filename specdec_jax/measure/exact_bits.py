"""Whether a decoder's bits depend on more than a row's own text: the self-test
of `exact_bits`, on the program that decodes."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from specdec_jax import logits, trees
from specdec_jax.base import (
  Array,
  Context,
  Draft,
  Drafter,
  Params,
  Prompt,
  Tree,
)
from specdec_jax.decoding.method import Method
from specdec_jax.decoding.program import Program
from specdec_jax.decoding.state import DecodeOutput
from specdec_jax.verification import speculative_sampling, target_sample_walk

# Iterations without a draft; each row then decodes the same with drafts.
_NUM_STEPS = 24


def check(method: Method, params: Any, prompt: Prompt, *, max_len: int) -> None:
  """Decodes random prompts greedily, first without drafts and then with rows in
  other places and drafts of which more or less is right, by one program.

  Args:
    method: its target, and the gamma or the tree of its drafter.
    params: the target's weights, where they lie.
    prompt: any of the batches: its shapes, and where it lies.
    max_len: as for `speculative.generate`.

  Raises:
    ValueError: if a token or the float32 log-probability of one differs.
  """
  method, rng = _with_oracle(method), np.random.default_rng(0)
  prompt = _random(rng, prompt, method.target.vocab_size, max_len)
  shape = prompt.decoder_tokens.shape[0], max_len
  off = {'tokens': jnp.zeros(shape, jnp.int32), 'is_on': jnp.zeros((), bool)}
  program = Program(
    method=method,
    params=Params(params, off),
    prompt=prompt,
    max_len=max_len,
  )
  generate, _ = program.whole.compile()
  key = jax.random.key(0)
  plain = jax.device_get(generate(Params(params, off), key, prompt))
  # Rows a, b, c become c, a, b.
  turn = lambda tree: jax.tree.map(lambda x: jnp.roll(x, 1, axis=0), tree)
  truth = {'tokens': turn(plain.tokens), 'is_on': jnp.ones((), bool)}
  drafted = generate(Params(params, truth), key, turn(prompt))
  if not same_bits(turn(plain), drafted):
    advice = 'give a chain, a shorter text,' if method.drafter.tree else 'give'
    raise ValueError(
      'exact_bits cannot be kept: as this model is compiled here, the bits of '
      f'a token depend on where its call has it; {advice} another gamma or '
      'batch size, or leave exact_bits out'
    )


def same_bits(one: DecodeOutput, other: DecodeOutput) -> bool:
  """Whether tokens and the bits of their log-probabilities are the same."""
  bits = lambda output: [
    np.asarray(output.tokens),
    np.asarray(output.log_probs).view(np.int32),
  ]
  return all(map(np.array_equal, bits(one), bits(other)))


def _with_oracle(method: Method) -> Method:
  """The same target, decoded greedily, with drafts from its params."""
  gamma, tree = method.drafter.gamma, method.drafter.tree
  rule = speculative_sampling
  if tree is not None:
    rule = lambda *args: target_sample_walk(*args, tree=tree)
  vocab_size = method.target.vocab_size
  return dataclasses.replace(
    method,
    drafter=_oracle(gamma, tree, vocab_size),
    verify_fn=rule,
    logits_to_probs=logits.standardize(temperature=0.0, vocab_size=vocab_size),
    eos_id=-1,
  )


def _oracle(gamma: int, tree: Tree | None, vocab_size: int) -> Drafter:
  """Drafts the tokens that it is given along one path to a node, another one in
  each iteration, and wrong ones elsewhere; nothing unless its params say so."""
  shape = tree or Tree(tuple(range(gamma)))
  # [N + 1, N]: of a chain of 2, to no node, to the first, to the second.
  right = jnp.asarray(trees.ancestors(shape)[:, 1:])
  depths = jnp.asarray(trees.depths(shape)[None, 1:])
  nodes = np.arange(gamma, dtype=np.int32)[None]

  def propose(params: Any, row_keys: Array, context: Context, state: Any):
    del row_keys
    at = context.lengths[:, None] + depths - 1
    truth = jnp.take_along_axis(params['tokens'], at, axis=1, mode='clip')
    rows = jnp.arange(at.shape[0], dtype=jnp.int32)
    ends = (context.lengths * 7 + rows) % (gamma + 1)
    wrong = (truth + 1 + nodes) % vocab_size
    tokens = jnp.where(right[ends], truth, wrong).astype(jnp.int32)
    lengths = jnp.where(params['is_on'] & (ends > 0), gamma, 0)
    return Draft(tokens=tokens, probs=None, lengths=lengths), state

  return Drafter(gamma, lambda params, prompt, max_len: (), propose, tree=tree)


def _random(
  rng: np.random.Generator, prompt: Prompt, vocab_size: int, max_len: int
) -> Prompt:
  """Prompts of random tokens and lengths, in the same places."""
  draw = lambda low, high, shape: jnp.asarray(
    rng.integers(low, high, shape), jnp.int32
  )
  tokens, given = prompt.decoder_tokens, prompt.encoder_tokens
  width = tokens.shape[1]
  lengths = draw((width + 1) // 2, width + 1, tokens.shape[:1])
  made = dataclasses.replace(
    prompt,
    # Id 0 would be padding.
    encoder_tokens=None if given is None else draw(1, vocab_size, given.shape),
    decoder_tokens=draw(1, vocab_size, tokens.shape),
    decoder_lengths=lengths,
    max_lengths=jnp.minimum(lengths + _NUM_STEPS, max_len),
  )
  old = dataclasses.replace(prompt, max_lengths=prompt.decoder_lengths)
  place = lambda new, old: jax.device_put(new, getattr(old, 'sharding', None))
  placed: Prompt = jax.tree.map(place, made, old)
  return placed
