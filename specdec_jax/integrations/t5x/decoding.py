"""Decoding for T5X models, and a `decode_fn` for T5X's own models (needs no
T5X)."""

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
  models,
  option_fields,
  packed_settings,
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

# Replaces forced EOS tokens in the loop: T5X's padding, which ends no row.
_EOS_PLACEHOLDER = 0


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
  """Returns a decoder of a T5X network, whose parameters `decode` receives.

  For the other arguments and `options`, which include the sampling options, see
  `specdec_jax.load`. An option that is None counts as unset.

  Args:
    module: see `t5_networks.config_of`.
    vocabulary: of SeqIO; it encodes the text of a drafter.
    draft_module: the network of the drafter 'model', with parameters at
      `params['draft']`.
    drafter_checkpoint: the weights of 'spec_drafter' or of 'block_heads': a
      folder, or 'ende-spec-drafter'; each device holds a copy.

  Raises ValueError for unknown networks, or options that do not fit together.
  """
  config = t5_networks.config_of(module)
  draft = _draft(config, vocabulary, drafter, draft_module, drafter_checkpoint)
  # The vocabulary as `assembly` needs it. SeqIO's preprocessors add EOS.
  adapted: Any = types.SimpleNamespace(
    vocab_size=config.vocab_size,
    eos_ids=(),
    encode=lambda text, **_: list(vocabulary.encode(text)),
  )
  options = {'gamma': gamma, **options}
  # A decode_fn is called while T5X traces.
  with jax.ensure_compile_time_eval():
    assembled = api.of_network(
      'module',
      config,
      adapted,
      drafter=drafter,
      draft=draft,
      verification=verification,
      options={k: value for k, value in options.items() if value is not None},
    )
    _check(assembled, drafter)
    drafter_params: Any = ()
    if draft and assembled.parts.drafting.config and draft_module is None:
      drafter_params = jax.device_get(
        models.read_params(draft, assembled.parts.drafting.config)
      )
  # `decode` receives all other weights.
  return dataclasses.replace(
    assembled, params=Params(target=(), drafter=drafter_params)
  )


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
  """Decodes a batch of T5X.

  The draft model's parameters are at `params['draft']`. `rng_key` is raw or
  typed; None is the seed 0. A row has at most `max_len` tokens, with its start
  token. Where `forced`, int32 `[B, <= max_len]`, is not 0, the row has this
  token, also after the prompt and whatever the logits processors do. Raises
  ValueError if the parameters do not fit the networks, or a draft is longer
  than a row.
  """
  joined = _params(params, decoder)
  gamma = decoder.drafter.gamma
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
  process = packed_settings.packer(
    [decoder.sampling], eos_ids=(eos_id,), vocab_size=decoder.config.vocab_size
  )
  limits = jnp.full_like(prompt.decoder_lengths, max_len)
  prompt = dataclasses.replace(prompt, max_lengths=limits)
  prompt = process([0] * limits.size, prompt)
  if forced is not None and prompt.processors is not None:
    processors = _force_processors(prompt.processors, forced, eos_id=eos_id)
    prompt = dataclasses.replace(prompt, processors=processors)
  key = jax.random.key(0) if rng_key is None else rng_key
  with _mesh_of_t5x():
    output = speculative.generate(
      joined, key, prompt, method=method, max_len=max_len
    )
  if forced is not None:
    # Undo the replacement of EOS by `_force`, within the length of the row.
    is_eos = arrays.is_within(output.lengths, max_len) & (forced == eos_id)
    tokens = jnp.where(is_eos, eos_id, output.tokens)
    output = dataclasses.replace(output, tokens=tokens)
  return output


def prompt_of(
  encoder_tokens: Array | None,
  decoder_tokens: Array,
  starts: Array | None = None,
) -> Prompt:
  """Returns a prompt from T5X's arrays.

  Args:
    encoder_tokens: int32 `[B, E]`, padded with 0.
    decoder_tokens: int32 `[B, L]`: the start token 0, forced tokens, then 0s.
    starts: int32 `[B]`, the position of the last token of the prompt; by
      default the prompt ends before the first 0.
  """
  # In [0 5 6 0 7] the prompt is [0 5 6], and the 7 is forced at its position.
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
  """A `decode_fn` of T5X's own models, for every drafter but 'model'; returns
  tokens int32 `[B, 1, L]` and scores float32 `[B, 1]`.

  The arguments are T5X's and those of `decoder`; by default the sampling is
  what gin binds for T5X's `temperature_sample`. `inputs` are forced tokens, see
  `prompt_of`; for `tokens_to_logits` see `contract.reach`. Raises ValueError if
  `num_decodes` is not 1, for scanned layers, other networks, and the drafter
  'model'.
  """
  # The compiler removes the unused `cache`, and T5X's pass of the encoder.
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
  # `[B, num_decodes, L]` with one decode, without the start token.
  scores = counters(output)['scores']
  return output.tokens[:, None, 1:], scores[:, None]


def counters(output: DecodeOutput) -> dict[str, Array]:
  """Returns the statistics that a T5X model reports, int32 `[B]`, and `scores`,
  float32 `[B]`: the log-probability of each continuation under the model's
  softmax."""
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
  """Returns the tokens after the prompt, moved left: int32 `[B, S - 1]`."""
  # A row [0 5 6 8 9 0] with a prompt of 3 tokens becomes [8 9 0 0 0].
  starts = prompt.decoder_lengths
  width = output.tokens.shape[1] - 1
  moved = arrays.read_block(output.tokens, starts, width)
  return jnp.where(arrays.is_within(output.lengths - starts, width), moved, 0)


def _draft(
  target: T5Config,
  vocabulary: Any,
  drafter: str,
  draft_module: Any | None,
  checkpoint: str | None,
) -> Model | None:
  """Returns the model of the drafter, if it has one; ValueError if the weights
  that it needs are missing, or the vocabularies of the models differ."""
  # The network of 'model' is T5X's; weights of other drafters are read here.
  needed = ''
  if has_model(option_fields.by_name('drafter', DRAFTERS, drafter)):
    needed = 'draft_module' if drafter == 'model' else 'drafter_checkpoint'
  arguments = {'draft_module': draft_module, 'drafter_checkpoint': checkpoint}
  for name, value in arguments.items():
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
  """Raises ValueError for options that T5X's batches do not support, or that
  have no effect."""
  sampling = decoder.sampling
  verifier = decoder.recipe.rule.judge(sampling)
  has_grammar = sampling.grammar_name is not None
  if has_grammar or drafter == 'grammar':
    raise ValueError('grammars are not supported inside T5X')
  if drafter == 'none' and not verifier.is_lossless:
    raise ValueError(
      f'verification {verifier.name} with its options changes nothing with '
      'drafter none, which drafts nothing: leave it out'
    )


def _params(params: Weights, decoder: Decoder) -> Params:
  """Splits T5X's parameters into the target's and the drafter's."""
  # The draft model's tree is a branch of the target's.
  params = dict(params)
  draft_params: Any = params.pop(DRAFT, {})
  if isinstance(decoder.recipe.drafter, DraftModel):
    config: Any = decoder.parts.drafting.config
    role = f"draft model at params['{DRAFT}']"
    drafter = t5_networks.params_of(draft_params, config, role=role)
  else:
    drafter = jax.tree.map(jnp.asarray, decoder.params.drafter)
  target = t5_networks.params_of(params, decoder.config, role='target')
  joined = decoder.parts.drafting.join(target, drafter)
  return Params(target=target, drafter=joined)


def _force(
  model: LanguageModel, tokens: Array, *, eos_id: int
) -> LanguageModel:
  """Returns the model with logits that force `tokens[b, i]` at position i of
  row b, where it is not 0."""
  # A forced EOS does not end a row in T5X. The loop sees a placeholder, which
  # the model reads as EOS, and `decode` puts EOS back. The added column stands
  # for the position after the last, where nothing is forced.
  tokens = jnp.pad(tokens, ((0, 0), (0, 1)))

  def extend(params, appended: Array, cache, at=None, **options: Any):
    positions = arrays.block_positions(cache.lengths, appended.shape[1])
    if (placement := options.get('placement')) is not None:
      positions = placement.positions
    # With tokens [0, 5, 6, 0], 6 is forced to follow position 1.
    forced_at = functools.partial(
      jnp.take_along_axis, tokens, axis=1, mode='clip'
    )
    appended = jnp.where(forced_at(positions) == eos_id, eos_id, appended)
    following = forced_at(positions + 1)
    logits, cache = model.extend(params, appended, cache, at, **options)
    if at is not None:
      following = arrays.read_block(following, at, 1)
    # One-hot logits `[B, T, V]` where `following[B, T]` are not 0.
    seen = jnp.where(following == eos_id, _EOS_PLACEHOLDER, following)[
      ..., None
    ]
    ids = jax.lax.broadcasted_iota(jnp.int32, logits.shape, logits.ndim - 1)
    one_hot = jnp.where(ids == seen, 0.0, -jnp.inf).astype(logits.dtype)
    return jnp.where(following[..., None] != 0, one_hot, logits), cache

  return model._replace(extend=extend)


def _force_processors(
  rows: Processors, tokens: Array, *, eos_id: int
) -> Processors:
  """Returns logits processors that force `tokens`, int32 `[B, S]`, at their
  positions, in place of the tokens that the processors would force there."""
  never = jnp.int32(jnp.iinfo(jnp.int32).max)
  columns = jnp.arange(tokens.shape[1], dtype=jnp.int32)
  positions = jnp.where(tokens != 0, columns, never)
  is_taken = jnp.any(
    rows.forced_at[:, :, None] == positions[:, None, :], axis=-1
  )
  forced_elsewhere = jnp.where(is_taken, never, rows.forced_at)
  seen = jnp.where(tokens == eos_id, _EOS_PLACEHOLDER, tokens)
  return dataclasses.replace(
    rows,
    forced=jnp.concatenate([rows.forced, seen], axis=1),
    forced_at=jnp.concatenate([forced_elsewhere, positions], axis=1),
  )


def _mesh_of_t5x() -> Any:
  """Sets the mesh that T5X entered by `with mesh:`, JAX's former interface, as
  the one that `sharding.rules` uses."""
  with warnings.catch_warnings():
    warnings.simplefilter('ignore', DeprecationWarning)
    from jax.interpreters import pxla

    mesh = pxla.thread_resources.env.physical_mesh
  if mesh.size <= 1:
    return contextlib.nullcontext()
  return jax.sharding.use_abstract_mesh(mesh.abstract_mesh)
