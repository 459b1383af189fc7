"""The decode that a T5X model is given in place of its own, and a `decode_fn`
for T5X's own models (needs no T5X)."""

import contextlib
import dataclasses
import functools
import types
import warnings
from typing import Any

import jax
import jax.numpy as jnp

from specdec_jax import arrays
from specdec_jax.assembly import lengths, models, option_fields, processing
from specdec_jax.assembly.drafters import DRAFTERS
from specdec_jax.assembly.drafters.choice import Drafting, Target, has_model
from specdec_jax.assembly.models import Model
from specdec_jax.assembly.rules import RULES, Rule, SpeculativeSampling
from specdec_jax.assembly.sampling import Options, Sampling
from specdec_jax.base import Array, LanguageModel, Params, Prompt
from specdec_jax.decoding import autoregressive, speculative
from specdec_jax.decoding.state import DecodeOutput
from specdec_jax.integrations.t5x import contract, t5_networks
from specdec_jax.integrations.t5x.t5_networks import DRAFT, refusal
from specdec_jax.models.layers import Weights
from specdec_jax.models.t5 import T5Config

# What the loop sees where an EOS is forced: T5X's padding, which ends no row.
_STAND_IN = 0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings(Options):
  """How to speculate, but for the options of single drafters and rules.

  Attributes:
    drafter: a name of `assembly.drafters.DRAFTERS`. The parameters of 'model'
      are at `params['draft']`.
    drafter_checkpoint: the weights of 'spec_drafter' or of 'block_heads': a
      folder, or 'ende-spec-drafter'; constants, each device has a copy.
    gamma: tokens drafted per target run, at most.
    verification: a name of `assembly.rules.RULES`.
    temperature: as all others, of `assembly.sampling.Options`.
  """

  drafter: str = 'prompt_lookup'
  drafter_checkpoint: str | None = None
  gamma: int = 4
  verification: str = 'speculative_sampling'

  def __post_init__(self):
    option_fields.by_name('drafter', DRAFTERS, self.drafter)
    is_plain = self.drafter == 'none'
    if not is_plain and isinstance(lengths.of(gamma=self.gamma), lengths.Auto):
      raise ValueError(
        'gamma auto measures batches, of which T5X has one: give a number'
      )
    if self.regex or self.json_schema or self.drafter == 'grammar':
      raise ValueError('grammars need a vocabulary, and T5X none')
    judge = self.rule.judge(self.sampling)
    if is_plain and not judge.is_lossless:
      raise ValueError(
        f'verification {self.verification} with its options changes nothing '
        'with drafter none, which drafts nothing: leave it out'
      )
    judge.sampling.check_is_used()

  @property
  def sampling(self) -> Sampling:
    """How the target is sampled."""
    names = option_fields.field_names(Sampling)
    return Sampling(**{name: getattr(self, name) for name in names})

  @property
  def rule(self) -> Rule:
    """The acceptance rule."""
    return option_fields.chosen(
      'verification', RULES, self.verification, vars(self)
    )


_OPTIONS = {
  name
  for choice in (*DRAFTERS.values(), *RULES.values())
  for name in option_fields.options_of(choice)
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
    target: what the drafter knows of the T5X model's network.
    drafting: the drafter made for it.
    draft: sizes of T5X's draft model, if that drafts.
    weights: of the drafter, if they are of a `drafter_checkpoint`.
  """

  target: Target
  drafting: Drafting
  draft: T5Config | None = None
  weights: Weights | tuple = ()


def networks(
  speculation: Settings, module: Any, draft_module: Any | None, vocabulary: Any
) -> Networks:
  """Reads the sizes of T5X's networks and makes the drafter, with its text or
  its checkpoint; ValueError if they are not known or do not fit together."""
  _check_given(speculation, draft_module)
  name = speculation.drafter
  fixed: dict[str, Model] = {}
  target, draft = t5_networks.config_of(module), None
  if draft_module is not None:
    draft = t5_networks.config_of(draft_module)
    sizes = target.vocab_size, draft.vocab_size
    # Target or draft model may be padded further than the other.
    if sizes[0] != sizes[1] and min(sizes) < vocabulary.vocab_size:
      raise ValueError(
        f'the target has {sizes[0]} token ids, the draft model {sizes[1]} and '
        f'the vocabulary {vocabulary.vocab_size}: they must share a vocabulary'
      )
    fixed['model'] = Model(checkpoint='draft_module', sizes=draft)
  elif (checkpoint := speculation.drafter_checkpoint) is not None:
    dtype = jnp.dtype(target.dtype).name
    fixed['model'] = Model(checkpoint=checkpoint, dtype=dtype)
  # The interface that `assembly` needs. No id is padding; SeqIO's preprocessors
  # add EOS.
  adapted: Any = types.SimpleNamespace(
    vocab_size=target.vocab_size,
    eos_ids=(),
    encode=lambda text, **_: list(vocabulary.encode(text)),
  )
  seen = Target(
    name='module',
    config=target,
    vocabulary=adapted,
    sampling=speculation.sampling,
  )
  weights: Any = ()
  # A decode_fn is called while T5X traces.
  with jax.ensure_compile_time_eval():
    choice = option_fields.chosen(
      'drafter', DRAFTERS, name, vars(speculation), **fixed
    )
    made = choice.make(seen, choice.length)
    if made.model and made.config and draft is None:
      weights = jax.device_get(models.read_params(made.model, made.config))
  return Networks(target=seen, drafting=made, draft=draft, weights=weights)


def decode(
  params: Weights,
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

  The draft model's parameters are at `params['draft']`; keys are raw, typed, or
  None for the seed 0. A row has at most `max_len` tokens with its start token.
  `forced` tokens, int32 `[B, <= max_len]`, stand where they are not 0, beyond
  the prompt as well. Raises ValueError if the parameters are not those of the
  networks, or gamma is beyond what a row can hold.
  """
  made, vocab_size = networks.drafting, networks.target.vocab_size
  joined = _params(params, networks)
  if made.drafter.gamma > max_len - 1:
    raise refusal(
      f'a draft has {made.drafter.gamma} tokens, and the rows of this batch '
      f'have room for {max_len - 1}: lower gamma, or draft a smaller tree'
    )
  is_plain = speculation.drafter == 'none'
  rule = SpeculativeSampling() if is_plain else speculation.rule
  method = made.method(networks.target, rule)
  method = dataclasses.replace(method, eos_id=eos_id)
  if forced is not None:
    forced = jnp.pad(forced, ((0, 0), (0, max_len - forced.shape[1])))
    forcing = _force(method.target, forced, eos_id=eos_id)
    method = dataclasses.replace(method, target=forcing)
  process = processing.packer(
    [speculation.sampling], eos_ids=(eos_id,), vocab_size=vocab_size
  )
  limits = jnp.full_like(prompt.decoder_lengths, max_len)
  prompt = dataclasses.replace(prompt, max_lengths=limits)
  prompt = process([0] * limits.size, prompt)
  loop: Any = autoregressive if is_plain else speculative
  key = jax.random.key(0) if rng_key is None else rng_key
  with _mesh_of_t5x():
    output = loop.generate(joined, key, prompt, method=method, max_len=max_len)
  if forced is not None:
    # Undoes what `_force` does to EOS, within the row: beyond it are 0s.
    is_eos = arrays.is_within(output.lengths, max_len) & (forced == eos_id)
    tokens = jnp.where(is_eos, eos_id, output.tokens)
    output = dataclasses.replace(output, tokens=tokens)
  return output


def prompt_of(
  encoder_tokens: Array | None,
  decoder_tokens: Array,
  starts: Array | None = None,
) -> Prompt:
  """Returns a prompt from T5X's arrays: the encoder's tokens int32 `[B, E]`, 0
  where padded; the decoder's int32 `[B, L]`, the start token 0, then forced
  tokens, then 0s; and int32 `[B]` where the last token of each prompt stands,
  None where the first forced tokens end."""
  # Of [0 5 6 0 7]: the prompt is [0 5 6], and the 7 is forced in its place.
  if starts is None:
    starts = arrays.count_leading(decoder_tokens[:, 1:] != 0)
  return Prompt(
    encoder_tokens=encoder_tokens,
    decoder_tokens=decoder_tokens.astype(jnp.int32),
    decoder_lengths=starts.astype(jnp.int32) + 1,
    row_ids=jnp.arange(decoder_tokens.shape[0], dtype=jnp.int32),
  )


def speculative_decode(
  inputs: Array,
  cache: Any,
  tokens_to_logits: Any,
  eos_id: int,
  decode_rng: Array | None = None,
  num_decodes: int = 1,
  cache_offset: int = 0,
  initial_index: Array | None = None,
  **speculation: Any,
) -> tuple[Array, Array]:
  """Decodes as a `decode_fn` of T5X's own models, with every drafter but
  'model'; returns tokens int32 `[B, 1, L]` and scores float32 `[B, 1]`.

  Arguments are T5X's, and those of `Speculation`, whose sampling is by default
  what gin binds for T5X's `temperature_sample`. `inputs` are forced tokens, see
  `prompt_of`; for `tokens_to_logits` see `contract.reach`. ValueError for more
  decodes than one, scanned layers, other networks, or the drafter 'model'.
  """
  # The compiler drops `cache`, and T5X's encoder pass.
  contract.check_num_decodes(num_decodes)
  if cache_offset:
    raise refusal('the network scans its layers, which is not supported')
  settings = Speculation(**(contract.sampling_of_t5x() | speculation))
  if settings.drafter == 'model':
    raise refusal(
      'a decode_fn has no draft model: use SpeculativeEncoderDecoderModel or '
      'SpeculativeDecoderOnlyModel'
    )
  model, params, encoder_tokens = contract.reach(tokens_to_logits)
  output = decode(
    params,
    decode_rng,
    prompt_of(encoder_tokens, inputs, initial_index),
    speculation=settings,
    networks=networks(settings, model.module, None, model.output_vocabulary),
    max_len=inputs.shape[1] + 1,
    eos_id=eos_id,
    forced=inputs,
  )
  # `[B, decodes, L]`, of one decode each, without the start token.
  return output.tokens[:, None, 1:], counters(output)['scores'][:, None]


def counters(output: DecodeOutput) -> dict[str, Array]:
  """Returns what a T5X model reports: int32 `[B]` each, and as `scores` the
  float32 `[B]` log-probability of what each row was continued with, under the
  model's own softmax."""
  counts = output.statistics
  return {
    'scores': jnp.sum(output.log_probs, axis=1),
    'num_tokens': counts.num_tokens,
    'num_target_runs': counts.num_target_runs,
    'num_drafted': counts.num_drafted,
    'num_accepted': jnp.sum(counts.num_accepted, axis=1),
    'has_nan': output.has_nan.astype(jnp.int32),
  }


def continuation(output: DecodeOutput, prompt: Prompt) -> Array:
  """Returns what followed the prompt, moved to the left: int32 `[B, S - 1]`."""
  # A row [0 5 6 8 9 0] with a prompt of 3 tokens becomes [8 9 0 0 0].
  starts, width = prompt.decoder_lengths, output.tokens.shape[1] - 1
  moved = arrays.read_block(output.tokens, starts, width)
  return jnp.where(arrays.is_within(output.lengths - starts, width), moved, 0)


def _check_given(speculation: Settings, draft_module: Any | None) -> None:
  """Raises ValueError unless a drafter with weights is told where they are, and
  no other."""
  # The network of 'model' is T5X's; weights of other drafters are read here.
  name, needed = speculation.drafter, ''
  if has_model(DRAFTERS[name]):
    needed = 'draft_module' if name == 'model' else 'drafter_checkpoint'
  for each, value in (
    ('draft_module', draft_module),
    ('drafter_checkpoint', speculation.drafter_checkpoint),
  ):
    if (value is not None) != (each == needed):
      verb = 'needs a' if each == needed else 'takes no'
      raise refusal(f'drafter {name!r} {verb} {each}')


def _params(params: Weights, networks: Networks) -> Params:
  # The target's tree has the draft model's as one of its names.
  params = dict(params)
  own = params.pop(DRAFT, ())
  if networks.draft is None:
    own = jax.tree.map(jnp.asarray, networks.weights)
  elif own == ():
    raise refusal(
      f"there are no parameters of the draft model at params['{DRAFT}']"
    )
  else:
    own = t5_networks.params_of(own, networks.draft, role='draft model')
  config = networks.target.config
  target = t5_networks.params_of(params, config, role='target')
  return Params(target=target, drafter=networks.drafting.join(target, own))


def _force(
  model: LanguageModel, tokens: Array, *, eos_id: int
) -> LanguageModel:
  """Returns a T5 that gives all probability to `tokens[b, i]` at position i of
  row b, where that is not 0, and is itself elsewhere."""
  # A forced EOS does not end a row in T5X. The loop is given 0 in its place,
  # which the model reads as the EOS that it stands for; `decode` undoes it.
  # Beyond the last position nothing is forced, as in this column.
  tokens = jnp.pad(tokens, ((0, 0), (0, 1)))

  def extend(params, appended: Array, cache, at=None, **options: Any):
    positions = arrays.block_positions(cache.lengths, appended.shape[1])
    if (placement := options.get('placement')) is not None:
      positions = placement.positions
    # With tokens [0, 5, 6, 0], 6 is forced to follow position 1.
    of = functools.partial(jnp.take_along_axis, tokens, axis=1, mode='clip')
    appended = jnp.where(of(positions) == eos_id, eos_id, appended)
    following = of(positions + 1)
    logits, cache = model.extend(params, appended, cache, at, **options)
    if at is not None:
      following = arrays.read_block(following, at, 1)
    # One-hot logits `[B, T, V]` where `following[B, T]` are not 0.
    seen = jnp.where(following == eos_id, _STAND_IN, following)[..., None]
    ids = jax.lax.broadcasted_iota(jnp.int32, logits.shape, logits.ndim - 1)
    one_hot = jnp.where(ids == seen, 0.0, -jnp.inf).astype(logits.dtype)
    return jnp.where(following[..., None] != 0, one_hot, logits), cache

  return model._replace(extend=extend)


def _mesh_of_t5x() -> Any:
  """Makes the mesh that T5X entered in JAX's old way (`with mesh:`) the one
  that `sharding.rules` sees."""
  with warnings.catch_warnings():
    warnings.simplefilter('ignore', DeprecationWarning)
    from jax.interpreters import pxla

    mesh = pxla.thread_resources.env.physical_mesh
  if mesh.size <= 1:
    return contextlib.nullcontext()
  return jax.sharding.use_abstract_mesh(mesh.abstract_mesh)
