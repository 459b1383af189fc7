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
from specdec_jax.assembly import (
  api,
  constraints,
  models,
  option_fields,
  processing,
)
from specdec_jax.assembly.decoder import Decoder
from specdec_jax.assembly.drafters import DRAFTERS, DraftModel
from specdec_jax.assembly.drafters.choice import has_model
from specdec_jax.assembly.models import Model
from specdec_jax.base import Array, LanguageModel, Params, Processors, Prompt
from specdec_jax.decoding import speculative
from specdec_jax.decoding.state import DecodeOutput
from specdec_jax.integrations.t5x import contract, t5_networks
from specdec_jax.integrations.t5x.t5_networks import DRAFT, refusal
from specdec_jax.models.products import Weights
from specdec_jax.models.t5 import T5Config

# What the loop sees where an EOS is forced: T5X's padding, which ends no row.
_STAND_IN = 0


def decoder(
  module: Any,
  vocabulary: Any,
  *,
  draft_module: Any = None,
  drafter: str = 'prompt_lookup',
  drafter_checkpoint: str | None = None,
  gamma: int = 4,
  verification: str = 'speculative_sampling',
  **options: Any,
) -> Decoder:
  """Makes a decoder of a T5X network, whose parameters are given to `decode`.

  For what is not said here, and for `options`, which say how to sample too, see
  `specdec_jax.load`; an option that is None counts as not given.

  Args:
    module: see `t5_networks.config_of`.
    vocabulary: of SeqIO; it encodes the text of a drafter.
    draft_module: the network of 'model', with parameters at `params['draft']`.
    drafter_checkpoint: the weights of 'spec_drafter' or of 'block_heads': a
      folder, or 'ende-spec-drafter'; constants, each device has a copy.

  Raises ValueError if networks are not known, or the choices do not fit.
  """
  config = t5_networks.config_of(module)
  draft = _draft(config, vocabulary, drafter, draft_module, drafter_checkpoint)
  # The interface that `assembly` needs. No id is padding; SeqIO's preprocessors
  # add EOS.
  adapted: Any = types.SimpleNamespace(
    vocab_size=config.vocab_size,
    eos_ids=(),
    encode=lambda text, **_: list(vocabulary.encode(text)),
  )
  given = {'gamma': gamma, **options}
  # A decode_fn is called while T5X traces.
  with jax.ensure_compile_time_eval():
    made = api.of_network(
      'module',
      config,
      adapted,
      drafter=drafter,
      draft=draft,
      verification=verification,
      options={name: x for name, x in given.items() if x is not None},
    )
    _check(made, drafter)
    own: Any = ()
    if draft and made.parts.drafting.config and draft_module is None:
      own = jax.device_get(
        models.read_params(draft, made.parts.drafting.config)
      )
  # All other weights are given to `decode`.
  return dataclasses.replace(made, params=Params(target=(), drafter=own))


def decode(
  params: Weights,
  rng_key: Array | None,
  prompt: Prompt,
  *,
  decoder: Decoder,
  max_len: int,
  eos_id: int,
  forced: Array | None = None,
) -> DecodeOutput:
  """Decodes a batch of T5X's.

  The draft model's parameters are at `params['draft']`; keys are raw, typed, or
  None for the seed 0. A row has at most `max_len` tokens with its start token.
  `forced` tokens, int32 `[B, <= max_len]`, stand where they are not 0, beyond
  the prompt as well, whatever processors say. Raises ValueError if the
  parameters are not those of the networks, or gamma is beyond what a row can
  hold.
  """
  joined, gamma = _params(params, decoder), decoder.drafter.gamma
  if gamma > max_len - 1:
    raise refusal(
      f'a draft has {gamma} tokens, and the rows of this batch have room for '
      f'{max_len - 1}: lower gamma, or draft a smaller tree'
    )
  method = dataclasses.replace(decoder.method, eos_id=eos_id)
  if forced is not None:
    forced = jnp.pad(forced, ((0, 0), (0, max_len - forced.shape[1])))
    forcing = _force(method.target, forced, eos_id=eos_id)
    method = dataclasses.replace(method, target=forcing)
  process = processing.packer(
    [decoder.sampling], eos_ids=(eos_id,), vocab_size=decoder.config.vocab_size
  )
  limits = jnp.full_like(prompt.decoder_lengths, max_len)
  prompt = dataclasses.replace(prompt, max_lengths=limits)
  prompt = process([0] * limits.size, prompt)
  if forced is not None and prompt.processors is not None:
    rows = _let_stand(prompt.processors, forced, eos_id=eos_id)
    prompt = dataclasses.replace(prompt, processors=rows)
  key = jax.random.key(0) if rng_key is None else rng_key
  with _mesh_of_t5x():
    output = speculative.generate(
      joined, key, prompt, method=method, max_len=max_len
    )
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
  **options: Any,
) -> tuple[Array, Array]:
  """Decodes as a `decode_fn` of T5X's own models, with every drafter but
  'model'; returns tokens int32 `[B, 1, L]` and scores float32 `[B, 1]`.

  Arguments are T5X's, and those of `decoder`, whose sampling is by default what
  gin binds for T5X's `temperature_sample`. `inputs` are forced tokens, see
  `prompt_of`; for `tokens_to_logits` see `contract.reach`. ValueError for more
  decodes than one, scanned layers, other networks, or the drafter 'model'.
  """
  # The compiler drops `cache`, and T5X's encoder pass.
  contract.check_num_decodes(num_decodes)
  if cache_offset:
    raise refusal('the network scans its layers, which is not supported')
  options = contract.sampling_of_t5x() | options
  if options.get('drafter') == 'model':
    raise refusal(
      'a decode_fn has no draft model: use SpeculativeEncoderDecoderModel or '
      'SpeculativeDecoderOnlyModel'
    )
  model, params, encoder_tokens = contract.reach(tokens_to_logits)
  output = decode(
    params,
    decode_rng,
    prompt_of(encoder_tokens, inputs, initial_index),
    decoder=decoder(model.module, model.output_vocabulary, **options),
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


def _draft(
  target: T5Config,
  vocabulary: Any,
  drafter: str,
  draft_module: Any | None,
  checkpoint: str | None,
) -> Model | None:
  """Returns where the drafter's weights are; ValueError unless they are given
  if it has some, or T5X's draft model has the target's vocabulary."""
  # The network of 'model' is T5X's; weights of other drafters are read here.
  needed = ''
  if has_model(option_fields.by_name('drafter', DRAFTERS, drafter)):
    needed = 'draft_module' if drafter == 'model' else 'drafter_checkpoint'
  given = {'draft_module': draft_module, 'drafter_checkpoint': checkpoint}
  for name, value in given.items():
    if (value is not None) != (name == needed):
      verb = 'needs a' if name == needed else 'takes no'
      raise refusal(f'drafter {drafter!r} {verb} {name}')
  if checkpoint is not None:
    return Model(checkpoint=checkpoint, dtype=jnp.dtype(target.dtype).name)
  if draft_module is None:
    return None
  draft = t5_networks.config_of(draft_module)
  sizes = target.vocab_size, draft.vocab_size
  # Target or draft model may be padded further than the other.
  if sizes[0] != sizes[1] and min(sizes) < vocabulary.vocab_size:
    raise ValueError(
      f'the target has {sizes[0]} token ids, the draft model {sizes[1]} and '
      f'the vocabulary {vocabulary.vocab_size}: they must share a vocabulary'
    )
  return Model(checkpoint='draft_module', sizes=draft)


def _check(decoder: Decoder, drafter: str) -> None:
  """Raises ValueError for choices that T5X's batches cannot have, or that
  change nothing."""
  sampling, judge = (
    decoder.sampling,
    decoder.recipe.rule.judge(decoder.sampling),
  )
  has_grammar = constraints.stated_text(sampling) is not None
  if has_grammar or drafter == 'grammar':
    raise ValueError('grammars need a vocabulary, and T5X none')
  if drafter == 'none' and not judge.is_lossless:
    raise ValueError(
      f'verification {judge.name} with its options changes nothing with '
      'drafter none, which drafts nothing: leave it out'
    )


def _params(params: Weights, decoder: Decoder) -> Params:
  # The target's tree has the draft model's as one of its names.
  params, made = dict(params), decoder.parts.drafting
  own: Any = params.pop(DRAFT, {})
  if isinstance(decoder.recipe.drafter, DraftModel):
    config: Any = made.config
    role = f"draft model at params['{DRAFT}']"
    own = t5_networks.params_of(own, config, role=role)
  else:
    own = jax.tree.map(jnp.asarray, decoder.params.drafter)
  target = t5_networks.params_of(params, decoder.config, role='target')
  return Params(target=target, drafter=made.join(target, own))


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


def _let_stand(rows: Processors, tokens: Array, *, eos_id: int) -> Processors:
  """Returns processors after which `tokens` of `_force`, int32 `[B, S]`, stand
  even so: at their places they are the ids that are forced, and no others."""
  never = jnp.int32(jnp.iinfo(jnp.int32).max)
  places = jnp.arange(tokens.shape[1], dtype=jnp.int32)
  due = jnp.where(tokens != 0, places, never)
  is_taken = jnp.any(rows.forced_at[:, :, None] == due[:, None, :], axis=-1)
  others = jnp.where(is_taken, never, rows.forced_at)
  seen = jnp.where(tokens == eos_id, _STAND_IN, tokens)
  return dataclasses.replace(
    rows,
    forced=jnp.concatenate([rows.forced, seen], axis=1),
    forced_at=jnp.concatenate([others, due], axis=1),
  )


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
