"""The decode that a T5X model is given in place of its own (needs no T5X)."""

import contextlib
import dataclasses
import warnings
from typing import Any

import jax
import jax.numpy as jnp

from specdec_jax import arrays
from specdec_jax.assembly import drafting, models
from specdec_jax.assembly.choices import (
  Sampling,
  by_name,
  chosen,
  flags_of,
  named_by_flags,
)
from specdec_jax.assembly.drafting import DRAFTERS, Drafting, Target
from specdec_jax.assembly.models import Model
from specdec_jax.assembly.rules import RULES, Rule
from specdec_jax.base import Array, Params, Prompt
from specdec_jax.decoding import autoregressive, speculative
from specdec_jax.decoding.state import DecodeOutput
from specdec_jax.integrations.t5x import forcing, t5_networks
from specdec_jax.integrations.t5x.t5_networks import WHERE_TO_READ
from specdec_jax.models import families
from specdec_jax.models.t5 import T5Config

# Where a T5X model keeps the parameters of its draft model.
DRAFT = 'draft'


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings:
  """How to speculate, but for the options of single drafters and rules.

  Attributes:
    drafter: a name of `assembly.drafting.DRAFTERS`. The parameters of 'model'
      are at `params['draft']`.
    drafter_checkpoint: the weights of 'spec_drafter' or of 'block_heads': a
      folder, or a name such as 'ende-spec-drafter'. They are constants of the
      compiled decode, and a copy is on every device.
    gamma: tokens drafted per target run, at most.
    verification: a name of `assembly.rules.RULES`.
    temperature: 0 is greedy.
    top_k: None keeps all.
    top_p: None keeps all.
    min_p: None keeps all.
  """

  drafter: str = 'prompt_lookup'
  drafter_checkpoint: str | None = None
  gamma: int = 4
  verification: str = 'speculative_sampling'
  temperature: float = 0.0
  top_k: int | None = None
  top_p: float | None = None
  min_p: float | None = None

  @named_by_flags('{}')
  def __post_init__(self):
    by_name('drafter', DRAFTERS, self.drafter)
    self.rule.seen(self.sampling)

  @property
  def sampling(self) -> Sampling:
    """How the target is sampled."""
    names = [field.name for field in dataclasses.fields(Sampling)]
    return Sampling(**{name: getattr(self, name) for name in names})

  @property
  def rule(self) -> Rule:
    """The acceptance rule."""
    return chosen('verification', RULES, self.verification, vars(self))


_OPTIONS = {
  name
  for choice in (*DRAFTERS.values(), *RULES.values())
  for name in flags_of(choice)
}
# `Settings` and the options of all drafters and rules, None for their own
# defaults: every field is a gin parameter of the T5X models.
Speculation: Any = dataclasses.make_dataclass(
  'Speculation',
  [(name, Any, None) for name in sorted(_OPTIONS - {'gamma'})],
  bases=(Settings,),
  frozen=True,
  kw_only=True,
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Networks:
  """What decodes together.

  Attributes:
    target: sizes of the T5X model's network.
    drafting: the drafter made for it.
    draft: sizes of T5X's draft model, or None.
    weights: of the drafter, where they are of a `drafter_checkpoint`.
  """

  target: T5Config
  drafting: Drafting
  draft: T5Config | None = None
  weights: Any = ()


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Vocabulary:
  """A SeqIO vocabulary as `assembly` asks for one; no id is padding."""

  seqio: Any
  vocab_size: int
  eos_ids: tuple[int, ...] = ()

  def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
    del add_special_tokens  # SeqIO's preprocessors add them.
    return list(self.seqio.encode(text))


@named_by_flags('{}')
def networks(
  speculation: Settings,
  module: Any,
  draft_module: Any | None,
  vocabulary: Any,
) -> Networks:
  """Reads the sizes of T5X's networks and makes the drafter, with its text or
  its checkpoint.

  Args:
    speculation: how.
    module: the T5X model's network; see `t5_networks.config_of`.
    draft_module: the draft model's, or None.
    vocabulary: SeqIO's, of the output.

  Raises:
    ValueError: if the networks are not known or do not fit together, or what
      the drafter needs is not given or cannot be read.
  """
  _check_given(speculation, draft_module)
  name = speculation.drafter
  fixed: dict[str, Any] = {}
  target, draft = t5_networks.config_of(module), None
  if draft_module is not None:
    draft = t5_networks.config_of(draft_module)
    _check_vocabulary(target, draft, vocabulary)
    fixed['model'] = Model(checkpoint='draft_module', sizes=draft)
  elif (checkpoint := speculation.drafter_checkpoint) is not None:
    dtype = jnp.dtype(target.dtype).name
    fixed['model'] = Model(checkpoint=checkpoint, dtype=dtype)
  if name == 'ngram':
    fixed['is_sampled'] = bool(speculation.temperature)
  adapted: Any = _Vocabulary(seqio=vocabulary, vocab_size=target.vocab_size)
  seen = Target(
    name='module',
    config=target,
    vocabulary=adapted,
    sampling=speculation.sampling,
  )
  weights: Any = ()
  # T5X is tracing when it calls a decode_fn.
  with jax.ensure_compile_time_eval():
    choice = chosen('drafter', DRAFTERS, name, vars(speculation), **fixed)
    made = choice.make(seen)
    if made.model and made.config and draft is None:
      weights = jax.device_get(models.read_params(made.model, made.config))
  return Networks(target=target, drafting=made, draft=draft, weights=weights)


def decode(
  params: Any,
  rng_key: Array | None,
  prompt: Prompt,
  *,
  speculation: Settings,
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
  made, vocab_size = networks.drafting, networks.target.vocab_size
  joined = _params(params, networks)
  target = made.target or families.language_model(networks.target)
  if forced is not None:
    forced = jnp.pad(forced, ((0, 0), (0, max_len - forced.shape[1])))
    target = forcing.force(target, forced, eos_id=eos_id)
  arguments: dict[str, Any] = {
    'target': target,
    'max_len': max_len,
    'eos_id': eos_id,
  }
  generate: Any
  if speculation.drafter == 'none':
    generate, shown = autoregressive.generate, speculation.sampling
  else:
    generate = speculative.generate
    shown = speculation.rule.seen(speculation.sampling)
    arguments['drafter'] = made.drafter
    arguments['verify_fn'] = speculation.rule.verify_fn()
    _check_gamma(made.drafter.gamma, max_len - 1)
  with _mesh_of_t5x():
    output = generate(
      joined,
      jax.random.key(0) if rng_key is None else rng_key,
      prompt,
      logits_to_probs=shown.to_probs(vocab_size),
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


def _check_given(speculation: Settings, draft_module: Any | None) -> None:
  """Raises ValueError unless a drafter with weights is told where they are, and
  no other."""
  name, needed = speculation.drafter, ''
  if drafting.has_model(DRAFTERS[name]):
    needed = 'draft_module' if name == 'model' else 'drafter_checkpoint'
  for each, value in (
    ('draft_module', draft_module),
    ('drafter_checkpoint', speculation.drafter_checkpoint),
  ):
    if (value is not None) != (each == needed):
      verb = 'needs a' if each == needed else 'takes no'
      raise ValueError(f'drafter {name!r} {verb} {each}; {WHERE_TO_READ}')


def _check_vocabulary(target: T5Config, draft: T5Config, seqio: Any) -> None:
  """Raises ValueError if target or draft model lacks a token; either may be
  padded further than the other."""
  sizes = target.vocab_size, draft.vocab_size
  if sizes[0] != sizes[1] and min(sizes) < seqio.vocab_size:
    raise ValueError(
      f'the target has {sizes[0]} token ids, the draft model {sizes[1]} and '
      f'the vocabulary {seqio.vocab_size}: they must share a vocabulary'
    )


def _params(params: Any, networks: Networks) -> Params:
  """The parameters of target and drafter.

  Raises:
    ValueError: if they are not those of the networks.
  """
  params = dict(params)
  own = params.pop(DRAFT, ())
  if networks.draft is None:
    own = jax.tree.map(jnp.asarray, networks.weights)
  elif own == ():
    raise ValueError(
      f"there are no parameters of the draft model at params['{DRAFT}']; "
      f'{WHERE_TO_READ}'
    )
  else:
    own = t5_networks.params_of(own, networks.draft, role='draft model')
  target = t5_networks.params_of(params, networks.target, role='target')
  return Params(target=target, drafter=networks.drafting.join(target, own))


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
