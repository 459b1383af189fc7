"""Whether a decoder's bits depend on more than a row's own text: the self-test
of `exact_bits`, on the program that decodes."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from specdec_jax import arrays, logits
from specdec_jax.base import Array, Context, Draft, Drafter, Params, Prompt
from specdec_jax.decoding.method import Method
from specdec_jax.decoding.program import Program
from specdec_jax.decoding.state import DecodeOutput
from specdec_jax.verification import speculative_sampling

# Iterations without a draft; each row then decodes the same with drafts.
_NUM_STEPS = 48


def check(method: Method, params: Any, prompt: Prompt, *, max_len: int) -> None:
  """Decodes random prompts greedily, first without drafts and then with rows in
  other places and drafts of which more or less is right, by one program.

  Args:
    method: its target, and the gamma of its drafter, of chains.
    params: the target's weights, where they lie.
    prompt: any of the batches: its shapes, and where it lies.
    max_len: as for `speculative.generate`.

  Raises:
    ValueError: if a token or the float32 log-probability of one differs.
  """
  method, rng = _with_oracle(method), np.random.default_rng(0)
  prompt = _random(rng, prompt, method.target.vocab_size, max_len)
  place = prompt.decoder_tokens.sharding
  given = lambda tokens, is_on: {
    'tokens': jax.device_put(tokens, place),
    'is_on': jnp.asarray(is_on),
  }
  nothing = jnp.zeros((prompt.row_ids.size, max_len), jnp.int32)
  off = given(nothing, False)
  program = Program(
    method=method,
    params=Params(params, off),
    prompt=prompt,
    max_len=max_len,
  )
  generate, _ = program.whole.compile()
  key = jax.random.key(0)
  plain = generate(Params(params, off), key, prompt)
  # Rows a, b, c become c, a, b.
  turn = lambda x: jax.device_put(jnp.roll(x, 1, axis=0), x.sharding)
  plain, prompt = jax.tree.map(turn, (plain, prompt))
  truth = given(plain.tokens, True)
  if not _same_bits(plain, generate(Params(params, truth), key, prompt)):
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
  vocab_size = method.target.vocab_size
  return dataclasses.replace(
    method,
    drafter=_oracle(method.drafter.gamma, vocab_size),
    verify_fn=speculative_sampling,
    logits_to_probs=logits.standardize(temperature=0.0, vocab_size=vocab_size),
    eos_id=-1,
  )


def _oracle(gamma: int, vocab_size: int) -> Drafter:
  """Drafts the tokens that it is given, as many as another number in each
  iteration, and wrong ones after them; nothing unless its params say so."""
  nodes = np.arange(gamma, dtype=np.int32)[None]

  def propose(params: Any, row_keys: Array, context: Context, state: Any):
    del row_keys
    truth = arrays.read_block(params['tokens'], context.lengths, gamma)
    rows = jnp.arange(truth.shape[0], dtype=jnp.int32)
    # With gamma 3, rows 0 and 1 of length 4 have 0 and 1 right tokens, and of
    # length 5 they have 3 and 0.
    num_right = (context.lengths * 7 + rows) % (gamma + 1)
    wrong = (truth + 1 + nodes) % vocab_size
    is_on = params['is_on'] & (num_right > 0)
    draft = Draft(
      tokens=jnp.where(arrays.is_within(num_right, gamma), truth, wrong),
      probs=None,
      lengths=jnp.where(is_on, gamma, 0),
    )
    return draft, state

  return Drafter(gamma, lambda params, prompt, max_len: (), propose)


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
