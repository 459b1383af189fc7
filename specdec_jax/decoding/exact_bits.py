"""Whether a decoder's bits depend on more than a row's own text: the self-test
of `exact_bits`, on the program that decodes."""

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

# Iterations without a draft; each row then decodes the same with drafts.
_NUM_STEPS = 48


def of_one_width(method: Method) -> Method:
  """Makes a method call its target at one width, drafts or not; each path of a
  tree is then a chain."""
  target, drafter = method.target, method.drafter._replace(may_abstain=False)
  if drafter.tree is not None:
    target = tree_drafts.by_paths(target, drafter.tree)
  return dataclasses.replace(method, target=target, drafter=drafter)


def plain(method: Method) -> Method:
  """Makes plain decoding of the same bits as a method of one width: it drafts
  as well, and no draft counts."""
  own = method.drafter

  def propose(*args: Any) -> tuple[Draft, Any]:
    # Without the drafter, XLA would leave out what only that reads, such as the
    # target's features, and sum the rest in another order. XLA cannot know that
    # no length is below 0.
    draft, state = own.propose(*args)
    context: Context = args[2]
    lengths = jnp.where(context.lengths < 0, draft.lengths, 0)
    return dataclasses.replace(draft, lengths=lengths), state

  drafter = own._replace(propose=propose, takes_guesses=False)
  return dataclasses.replace(method, drafter=drafter)


def check(
  method: Method, params: Arrays, prompt: Prompt, *, max_len: int
) -> None:
  """Decodes random prompts greedily, first without drafts and then with rows in
  other places and drafts of which more or less is right, by one program.

  Args:
    method: its target, and the gamma and the tree of its drafter.
    params: the target's weights, where they lie.
    prompt: any of the batches: its shapes, and where it lies.
    max_len: as for `speculative.generate`.

  Raises:
    ValueError: if a token or the float32 log-probability of one differs.
  """
  method, rng = _with_oracle(method), np.random.default_rng(0)
  prompt = _random(rng, prompt, method.target.vocab_size, max_len)
  place, shape = prompt.decoder_tokens.sharding, (prompt.row_ids.size, max_len)
  given = lambda *values: Params(params, jax.device_put(values, place))
  nothing = jnp.zeros(shape, jnp.int32)
  off = given(nothing, nothing)
  program = Program(method=method, params=off, prompt=prompt, max_len=max_len)
  generate, _ = program.whole.compile()
  key = jax.random.key(0)
  expected = generate(off, key, prompt)
  # Rows a, b, c become c, a, b.
  turn = lambda x: jax.device_put(jnp.roll(x, 1, axis=0), x.sharding)
  expected, prompt = jax.tree.map(turn, (expected, prompt))
  ends = rng.integers(method.drafter.gamma + 1, size=shape, dtype=np.int32)
  drafted = given(expected.tokens, ends)
  if not _same_bits(expected, generate(drafted, key, prompt)):
    raise ValueError(
      'exact_bits cannot be kept: as this model is compiled here, the bits of '
      'a token depend on where its call has it; give another gamma or batch '
      'size, or leave exact_bits out'
    )


@jax.jit
def _same_bits(one: DecodeOutput, other: DecodeOutput) -> Array:
  """Tells whether tokens and the bits of their log-probabilities are equal."""
  bits = lambda x: jax.lax.bitcast_convert_type(x, jnp.int32)
  same_tokens = jnp.all(one.tokens == other.tokens)
  return same_tokens & jnp.all(bits(one.log_probs) == bits(other.log_probs))


def _with_oracle(method: Method) -> Method:
  """Makes a greedy method of the same target, with drafts from its params."""
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
  """Drafts the right tokens on the path to a node and wrong ones elsewhere, or
  nothing for node 0.

  Its params are the tokens, int32 `[B, S]`, and a node for each committed
  length, likewise.
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
  """Draws prompts of random tokens and lengths, placed as `prompt` is."""
  draw = lambda low, high, shape: jnp.asarray(
    rng.integers(low, high, shape), jnp.int32
  )
  # The test is greedy, whatever the rows are.
  prompt = dataclasses.replace(prompt, sampling=None)
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
