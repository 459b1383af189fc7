"""The decode that a T5X model is given in place of its own (needs no T5X)."""

import contextlib
import dataclasses
import warnings
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from specdec_jax import arrays, drafters, logits, verification
from specdec_jax.base import Array, Drafter, Params, Prompt, VerifyFn
from specdec_jax.data import ngram_counts
from specdec_jax.decoding import autoregressive, speculative
from specdec_jax.decoding.state import DecodeOutput
from specdec_jax.files.local_path import local_path
from specdec_jax.integrations.t5x import forcing, t5_networks
from specdec_jax.integrations.t5x.t5_networks import WHERE_TO_READ
from specdec_jax.models import families
from specdec_jax.models.t5 import T5Config

# Where a T5X model keeps the parameters of its draft model.
DRAFT = 'draft'
_VERIFY_FNS: dict[str, VerifyFn] = {
  'speculative_sampling': verification.speculative_sampling,
  'greedy': verification.greedy,
  'block': verification.block_verification,
}
_DRAFTERS = ('prompt_lookup', 'ngram', 'model', 'none')


class Vocabulary(Protocol):
  """What is used of a SeqIO vocabulary."""

  @property
  def vocab_size(self) -> int: ...

  def encode(self, text: str) -> Any: ...


@dataclasses.dataclass(frozen=True, kw_only=True)
class Speculation:
  """How to speculate; every field is a gin parameter of the T5X models.

  Attributes:
    drafter: 'prompt_lookup' copies from the text so far, 'ngram' follows a
      table counted from `ngram_text`, 'model' is a draft model whose parameters
      are at `params['draft']`, and 'none' decodes plainly.
    gamma: tokens drafted for every run of the target, at most.
    verification: 'speculative_sampling', 'block', or 'greedy' at temperature 0.
    temperature: 0 is greedy.
    top_k: None keeps all.
    top_p: None keeps all.
    min_p: None keeps all.
    max_ngram: the longest suffix that prompt lookup looks up.
    min_ngram: the shortest that it trusts.
    ngram_text: path of the text that 'ngram' counts.
  """

  drafter: str = 'prompt_lookup'
  gamma: int = 4
  verification: str = 'speculative_sampling'
  temperature: float = 0.0
  top_k: int | None = None
  top_p: float | None = None
  min_p: float | None = None
  max_ngram: int = 3
  min_ngram: int = 1
  ngram_text: str | None = None

  def __post_init__(self):
    if self.drafter not in _DRAFTERS:
      raise ValueError(
        f'drafter {self.drafter!r} is none of {", ".join(_DRAFTERS)}'
      )
    if self.verification not in _VERIFY_FNS:
      raise ValueError(
        f'verification {self.verification!r} is none of '
        f'{", ".join(_VERIFY_FNS)}'
      )
    if self.verification == 'greedy' and self.temperature:
      raise ValueError(
        "verification 'greedy' needs temperature 0, got "
        f'{self.temperature}: use speculative_sampling'
      )
    if (self.drafter == 'ngram') != (self.ngram_text is not None):
      raise ValueError("ngram_text goes with drafter 'ngram', and only with it")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Networks:
  """The sizes of the networks that decode together.

  Attributes:
    target: the T5X model's own.
    draft: the draft model's, or None.
    table: of the n-gram drafter, or None.
  """

  target: T5Config
  draft: T5Config | None = None
  table: drafters.NGramTable | None = None


def networks(
  speculation: Speculation,
  module: Any,
  draft_module: Any | None,
  vocabulary: Vocabulary,
) -> Networks:
  """Reads the sizes of T5X's networks, and counts the n-gram text.

  Raises:
    ValueError: if the networks are not known or do not fit together, or the
      text cannot be read.
  """
  if (speculation.drafter == 'model') != (draft_module is not None):
    raise ValueError(
      "draft_module goes with drafter 'model', and only with it; "
      f'{WHERE_TO_READ}'
    )
  target = t5_networks.config_of(module)
  draft = draft_module and t5_networks.config_of(draft_module)
  if draft and draft.vocab_size != target.vocab_size:
    # One may be padded further than the other, but no token may be missing.
    fewest = min(draft.vocab_size, target.vocab_size)
    if fewest < vocabulary.vocab_size:
      raise ValueError(
        f'the target has {target.vocab_size} token ids, the draft model '
        f'{draft.vocab_size} and the vocabulary {vocabulary.vocab_size}: they '
        'must share a vocabulary'
      )
  if draft and bool(draft.num_encoder_layers) != bool(
    target.num_encoder_layers
  ):
    raise ValueError(
      'target and draft model must both have an encoder, or neither'
    )
  table = None
  if speculation.ngram_text is not None:
    tokens = _read_tokens(speculation.ngram_text, vocabulary)
    table = ngram_counts.estimate(tokens, vocab_size=target.vocab_size)
  return Networks(target=target, draft=draft, table=table)


def decode(
  params: Any,
  rng_key: Array | None,
  prompt: Prompt,
  *,
  speculation: Speculation,
  networks: Networks,
  max_len: int,
  eos_id: int,
  forced: Array | None = None,
) -> DecodeOutput:
  """Decodes a batch of T5X's as `speculation` says.

  Args:
    params: of the T5X model, the draft model's at `params['draft']`.
    rng_key: a raw key as T5X has them, a typed one, or None for the seed 0.
    prompt: of every row.
    speculation: how.
    networks: whose parameters these are.
    max_len: the most tokens per row can have, its start token included.
    eos_id: ends a row.
    forced: int32 `[B, <= max_len]`, or None: tokens that stand where they are
      not 0, beyond the prompt as well.

  Raises:
    ValueError: if the parameters are not those of the networks, or gamma is
      beyond what a row can hold.
  """
  params = dict(params)
  draft_params = params.pop(DRAFT, ())
  if networks.draft is None:
    draft_params = ()
  elif draft_params == ():
    raise ValueError(
      f"there are no parameters of the draft model at params['{DRAFT}']; "
      f'{WHERE_TO_READ}'
    )
  else:
    draft_params = t5_networks.params_of(
      draft_params, networks.draft, role='draft model'
    )
  target = families.language_model(networks.target)
  if forced is not None:
    forced = jnp.pad(forced, ((0, 0), (0, max_len - forced.shape[1])))
    target = forcing.force(target, forced, eos_id=eos_id)
  arguments: dict[str, Any] = {
    'target': target,
    'logits_to_probs': _logits_to_probs(speculation),
    'max_len': max_len,
    'eos_id': eos_id,
  }
  generate: Any = autoregressive.generate
  if speculation.drafter != 'none':
    generate = speculative.generate
    arguments['drafter'] = drafter = _drafter(speculation, networks)
    _check_gamma(drafter.gamma, max_len - 1)
    arguments['verify_fn'] = _VERIFY_FNS[speculation.verification]
  with _mesh_of_t5x():
    output = generate(
      Params(
        target=t5_networks.params_of(params, networks.target, role='target'),
        drafter=draft_params,
      ),
      jax.random.key(0) if rng_key is None else rng_key,
      prompt,
      **arguments,
    )
  if forced is not None:
    output = forcing.restore_eos(output, forced, eos_id=eos_id)
  return output


def prompt_of(
  encoder_tokens: Array | None,
  decoder_tokens: Array,
  starts: Array | None = None,
) -> Prompt:
  """A prompt from T5X's arrays.

  Args:
    encoder_tokens: int32 `[B, E]`, 0 where padded; None if decoder-only.
    decoder_tokens: int32 `[B, L]`: the start token 0, then forced tokens, then
      0s.
    starts: int32 `[B]`, where the last token of each prompt stands; None where
      the first forced tokens end.
  """
  if starts is None:
    starts = arrays.count_leading(decoder_tokens[:, 1:] != 0)
  return Prompt(
    encoder_tokens=encoder_tokens,
    decoder_tokens=decoder_tokens.astype(jnp.int32),
    decoder_lengths=starts.astype(jnp.int32) + 1,
    row_ids=jnp.arange(decoder_tokens.shape[0], dtype=jnp.int32),
  )


def scores(output: DecodeOutput) -> Array:
  """float32 `[B]`: log-probability of what each row was continued with, under
  the model's own softmax."""
  return jnp.sum(output.log_probs, axis=1)


def counters(output: DecodeOutput) -> dict[str, Array]:
  """What a T5X model reports beside its scores, int32 `[B]` each."""
  counts = output.statistics
  return {
    'num_tokens': counts.num_tokens,
    'num_target_runs': counts.num_target_runs,
    'num_drafted': counts.num_drafted,
    'num_accepted': jnp.sum(counts.num_accepted, axis=1),
    'has_nan': output.has_nan.astype(jnp.int32),
  }


def continuation(output: DecodeOutput, prompt: Prompt) -> Array:
  """What followed the prompt, moved to the left: int32 `[B, S - 1]`."""
  starts, width = prompt.decoder_lengths, output.tokens.shape[1] - 1
  moved = arrays.read_block(output.tokens, starts, width)
  return jnp.where(arrays.is_within(output.lengths - starts, width), moved, 0)


def _check_gamma(gamma: int, num_tokens: int) -> None:
  """Raises ValueError if no row could hold a whole draft."""
  if gamma > num_tokens:
    raise ValueError(
      f'gamma is {gamma}, and the rows of this batch have room for '
      f'{num_tokens} tokens: set gamma to {num_tokens} or less; '
      f'{WHERE_TO_READ}'
    )


def _drafter(speculation: Speculation, networks: Networks) -> Drafter:
  to_probs = _logits_to_probs(speculation)
  if networks.draft is not None:
    return drafters.autoregressive(
      families.with_logits_of(
        families.language_model(networks.draft), networks.target.vocab_size
      ),
      gamma=speculation.gamma,
      logits_to_probs=to_probs,
      is_argmax=not speculation.temperature,
    )
  if networks.table is not None:
    return drafters.ngram(
      networks.table,
      gamma=speculation.gamma,
      logits_to_probs=to_probs if speculation.temperature else None,
    )
  return drafters.prompt_lookup(
    gamma=speculation.gamma,
    max_ngram=speculation.max_ngram,
    min_ngram=speculation.min_ngram,
  )


def _logits_to_probs(speculation: Speculation):
  return logits.standardize(
    temperature=speculation.temperature,
    top_k=speculation.top_k,
    top_p=speculation.top_p,
    min_p=speculation.min_p,
  )


def _read_tokens(path: str, vocabulary: Vocabulary) -> np.ndarray:
  try:
    text = local_path(path).read_text(encoding='utf-8')
  except (OSError, UnicodeDecodeError) as error:
    raise ValueError(f'cannot read ngram_text {path}: {error}') from error
  return np.asarray(vocabulary.encode(text), np.int32)


def _mesh_of_t5x() -> Any:
  """Makes the mesh that T5X entered the one that `sharding.rules` sees.

  T5X enters it in JAX's old way (`with mesh:`), which new code cannot see.
  """
  with warnings.catch_warnings():
    warnings.simplefilter('ignore', DeprecationWarning)
    from jax.interpreters import pxla

    mesh = pxla.thread_resources.env.physical_mesh
  if mesh.size <= 1:
    return contextlib.nullcontext()
  return jax.sharding.use_abstract_mesh(mesh.abstract_mesh)
