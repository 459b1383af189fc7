"""The self-test of `exact_bits`: whether the bits of a row's log-probabilities
depend on anything but its text, in the program that decodes."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from specdec_jax import arrays, trees, verification
from specdec_jax.base import (
  Array,
  Arrays,
  Context,
  Draft,
  Drafter,
  Params,
  Prompt,
  Tree,
  VerifyFn,
)
from specdec_jax.decoding import tree_drafts
from specdec_jax.decoding.method import Method
from specdec_jax.decoding.program import Program
from specdec_jax.decoding.state import DecodeOutput
from specdec_jax.sampling import logits

# Iterations without a draft; the same rows are then decoded with drafts.
_NUM_STEPS = 48


def of_one_width(method: Method) -> Method:
  """Returns a method that calls its target at one width, with and without
  drafts; the paths of a tree become chains."""
  target = method.target
  drafter = method.drafter._replace(may_abstain=False)
  if drafter.tree is not None:
    target = tree_drafts.by_paths(target, drafter.tree)
  return dataclasses.replace(method, target=target, drafter=drafter)


def plain(method: Method) -> Method:
  """Returns plain decoding with the same bits as a method of one width: it
  drafts as well, but ignores the drafts."""
  drafter = method.drafter

  def propose(*args: Any) -> tuple[Draft, Any]:
    # Without the drafter, XLA would remove its inputs, such as the target's
    # features, and sum the rest in another order. XLA does not know that no
    # length is below 0.
    draft, state = drafter.propose(*args)
    context: Context = args[2]
    lengths = jnp.where(context.lengths < 0, draft.lengths, 0)
    return dataclasses.replace(draft, lengths=lengths), state

  ignored = drafter._replace(propose=propose, takes_guesses=False)
  return dataclasses.replace(method, drafter=ignored)


def check(
  method: Method, params: Arrays, prompt: Prompt, *, max_len: int
) -> None:
  """Decodes random prompts greedily with one program: first without drafts, and
  then with permuted rows and drafts with random numbers of correct tokens.

  Args:
    method: the target, and the drafter's gamma and tree, are used.
    params: the target's weights, on their devices.
    prompt: any of the batches; its shapes and shardings are used.
    max_len: as for `speculative.generate`.

  Raises:
    ValueError: if a token or the float32 log-probability of one differs.
  """
  method = _with_oracle(method)
  rng = np.random.default_rng(0)
  prompt = _random(rng, prompt, method.target.vocab_size, max_len)
  sharding = prompt.decoder_tokens.sharding
  shape = prompt.row_ids.size, max_len
  with_oracle = lambda *values: Params(params, jax.device_put(values, sharding))
  # Decode without drafts.
  zeros = jnp.zeros(shape, jnp.int32)
  no_drafts = with_oracle(zeros, zeros)
  program = Program(
    method=method, params=no_drafts, prompt=prompt, max_len=max_len
  )
  generate, _ = program.whole.compile()
  key = jax.random.key(0)
  expected = generate(no_drafts, key, prompt)
  # Decode with drafts, in another order of rows: a, b, c become c, a, b.
  roll = lambda x: jax.device_put(jnp.roll(x, 1, axis=0), x.sharding)
  expected, prompt = jax.tree.map(roll, (expected, prompt))
  ends = rng.integers(method.drafter.gamma + 1, size=shape, dtype=np.int32)
  drafts = with_oracle(expected.tokens, ends)
  if not _same_bits(expected, generate(drafts, key, prompt)):
    raise ValueError(
      'exact_bits is not possible: in the program of this model, the bits of a '
      'token depend on its position in the call; use another gamma or batch '
      'size, or leave exact_bits out'
    )


@jax.jit
def _same_bits(first: DecodeOutput, second: DecodeOutput) -> Array:
  """Tells whether tokens and the bits of their log-probabilities are equal."""
  bits = lambda x: jax.lax.bitcast_convert_type(x, jnp.int32)
  same_tokens = jnp.all(first.tokens == second.tokens)
  same_log_probs = jnp.all(bits(first.log_probs) == bits(second.log_probs))
  return same_tokens & same_log_probs


def _with_oracle(method: Method) -> Method:
  """Returns a greedy method of the same target, with an oracle as drafter."""
  vocab_size, drafter = method.target.vocab_size, method.drafter
  rule: VerifyFn = verification.speculative_sampling
  if drafter.tree is not None:
    rule = functools.partial(verification.greedy_walk, tree=drafter.tree)
  return dataclasses.replace(
    method,
    drafter=_oracle(drafter.gamma, drafter.tree, vocab_size),
    verify_fn=rule,
    logits_to_probs=logits.standardize(temperature=0.0, vocab_size=vocab_size),
    eos_id=-1,
  )


def _oracle(gamma: int, tree: Tree | None, vocab_size: int) -> Drafter:
  """Drafts correct tokens on the path to a node and wrong ones elsewhere; no
  tokens for node 0.

  The params are the correct tokens, int32 `[B, S]`, and a node for every
  committed length, int32 `[B, S]`.
  """
  shape = tree or Tree(tuple(range(gamma)))
  above, depths = trees.ancestors(shape)[:, 1:], trees.depths(shape)[1:]
  nodes = np.arange(1, gamma + 1, dtype=np.int32)[None]

  def propose(
    params: tuple[Array, Array], row_keys: Array, context: Context, state: None
  ):
    del row_keys
    tokens, ends = params
    truth = arrays.read_block(tokens, context.lengths, int(depths[-1]))
    truth = truth[:, depths - 1]
    end = arrays.read_block(ends, context.lengths, 1)[:, 0]
    is_right = jnp.asarray(above)[end]
    draft = Draft(
      tokens=jnp.where(is_right, truth, (truth + nodes) % vocab_size),
      probs=None,
      lengths=jnp.where(end > 0, gamma, 0),
    )
    return draft, state

  return Drafter(
    gamma,
    lambda params, prompt, max_len: None,
    propose,
    tree=tree,
    takes_guesses=False,
  )


def _random(
  rng: np.random.Generator, prompt: Prompt, vocab_size: int, max_len: int
) -> Prompt:
  """Returns prompts of random tokens and lengths, sharded as `prompt`."""
  draw = lambda low, high, shape: jnp.asarray(
    rng.integers(low, high, shape), jnp.int32
  )
  # The test is greedy, whatever the sampling of the rows is.
  prompt = dataclasses.replace(prompt, sampling=None)
  tokens = prompt.decoder_tokens
  width = tokens.shape[1]
  lengths = draw((width + 1) // 2, width + 1, tokens.shape[:1])
  # Ids are drawn from 1 on, since 0 would be padding.
  encoder_tokens = None
  if prompt.encoder_tokens is not None:
    encoder_tokens = draw(1, vocab_size, prompt.encoder_tokens.shape)
  random_prompt = dataclasses.replace(
    prompt,
    encoder_tokens=encoder_tokens,
    decoder_tokens=draw(1, vocab_size, tokens.shape),
    decoder_lengths=lengths,
    max_lengths=jnp.minimum(lengths + _NUM_STEPS, max_len),
  )
  old = dataclasses.replace(prompt, max_lengths=prompt.decoder_lengths)
  place = lambda new, old: jax.device_put(new, getattr(old, 'sharding', None))
  placed: Prompt = jax.tree.map(place, random_prompt, old)
  return placed
