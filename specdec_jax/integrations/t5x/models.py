"""Models of T5X that decode speculatively.

T5X is not on PyPI: without it, importing this module raises ImportError.
"""

import inspect
from collections.abc import Callable, Mapping, MutableMapping
from typing import Any

import flax
import jax.numpy as jnp

from specdec_jax.base import Array, Prompt
from specdec_jax.decoding.state import DecodeOutput
from specdec_jax.integrations.t5x import contract, decoding
from specdec_jax.integrations.t5x.t5_networks import DRAFT

try:
  from t5x import models as t5x_models
except ImportError as error:
  raise ImportError(
    f'T5X cannot be imported ({error}): install it from '
    'https://github.com/google-research/t5x as its README says; see docs/t5x.md'
  ) from error

_EncoderDecoderModel: Any = t5x_models.EncoderDecoderModel
_DecoderOnlyModel: Any = t5x_models.DecoderOnlyModel


class _Speculative:
  """Speculative decoding, added to both of T5X's models."""

  stock: Any

  def __init__(self, *args: object, **kwargs: object):
    """Takes the arguments of T5X's model and of `decoding.decoder`; ValueError
    for unsupported ones."""
    arguments, options = _split(self.stock, args, kwargs)
    super().__init__(**arguments)
    contract.check_causal(self)
    model: Any = self
    self.decoder = decoding.decoder(
      model.module, model.output_vocabulary, **options
    )
    draft_module = options.get('draft_module')
    self.draft_model = draft_module and self.stock(
      **(arguments | {'module': draft_module})
    )

  def get_initial_variables(self, *args: object, **kwargs: object) -> Any:
    """Returns variables of the target, and of the draft model at 'draft'."""
    # T5X partitions and restores this tree, which therefore has both models.
    model: Any = super()
    variables = model.get_initial_variables(*args, **kwargs)
    if self.draft_model is None:
      return variables
    draft = self.draft_model.get_initial_variables(*args, **kwargs)
    joined = dict(flax.core.unfreeze(variables))
    for collection, values in flax.core.unfreeze(draft).items():
      joined[collection] = {**joined[collection], DRAFT: values}
    return flax.core.freeze(joined)

  def _decode(
    self,
    params: Any,
    prompt: Prompt,
    forced: Array | None,
    num_tokens: int,
    arguments: Mapping[str, Any],
  ) -> DecodeOutput:
    model: Any = self
    key, eos_id = contract.decoder_params_of(arguments, model.output_vocabulary)
    return decoding.decode(
      params,
      key,
      prompt,
      decoder=self.decoder,
      max_len=num_tokens + 1,
      eos_id=eos_id,
      forced=forced,
    )


class SpeculativeEncoderDecoderModel(_Speculative, _EncoderDecoderModel):
  """T5X's `EncoderDecoderModel`, which predicts by speculative decoding.

  Training, evaluation and scoring are T5X's own, on the target's parameters,
  whose names do not change.
  """

  stock = _EncoderDecoderModel

  def predict_batch_with_aux(
    self,
    params: Any,
    batch: Mapping[str, Array],
    rng: Array | None = None,
    decoder_params: MutableMapping[str, Any] | None = None,
    return_all_decodes: bool | None = None,
    num_decodes: int | None = None,
    prompt_with_targets: bool | None = None,
  ) -> tuple[Array, dict[str, Array]]:
    """Predicts a batch, as T5X's model does; returns int32 `[B, L]`, and
    `decoding.counters`.

    Arguments default to gin's bindings for the method of T5X's model. The draft
    model's parameters are at `params['draft']`; without `rng` the seed is 0.
    `decoder_params` may have only `decode_rng` and `eos_id`, and `num_decodes`
    must be 1, else ValueError. With `prompt_with_targets`, tokens after a gap
    in the targets are forced at their positions.
    """
    defaults = self._default_decoder_params
    arguments = {
      'return_all_decodes': defaults.return_all_decodes,
      'num_decodes': defaults.num_decodes,
    } | _with_bindings(
      _EncoderDecoderModel.predict_batch_with_aux,
      rng=rng,
      decoder_params=decoder_params,
      return_all_decodes=return_all_decodes,
      num_decodes=num_decodes,
      prompt_with_targets=prompt_with_targets,
    )
    targets = batch['decoder_input_tokens']
    forced = None
    first = jnp.zeros_like(targets[:, :1])
    if arguments.get('prompt_with_targets'):
      forced = first = targets * (targets != self.output_vocabulary.eos_id)
    prompt = decoding.prompt_of(batch['encoder_input_tokens'], first)
    output = self._decode(params, prompt, forced, targets.shape[1], arguments)
    return _result(
      output.tokens[:, 1:], output, arguments['return_all_decodes']
    )


class SpeculativeDecoderOnlyModel(_Speculative, _DecoderOnlyModel):
  """T5X's `DecoderOnlyModel`, which predicts by speculative decoding; see
  `SpeculativeEncoderDecoderModel`."""

  stock = _DecoderOnlyModel

  def predict_batch_with_aux(
    self,
    params: Any,
    batch: Mapping[str, Array],
    rng: Array | None = None,
    *,
    return_all_decodes: bool | None = None,
    num_decodes: int | None = None,
    decoder_params: MutableMapping[str, Any] | None = None,
  ) -> tuple[Array, dict[str, Array]]:
    """Continues the inputs of a batch: `decoder_input_tokens` and
    `decoder_causal_attention`, int32 `[B, L]`.

    As in T5X's model, the prompt has as many positions as the inputs have
    tokens that are not 0; tokens beyond it, after gaps, are forced at their
    positions. The result is int32 `[B, L]` without the inputs. Otherwise see
    `SpeculativeEncoderDecoderModel`.
    """
    if 'decoder_causal_attention' not in batch:
      raise ValueError(
        'the batch lacks decoder_causal_attention: task_feature_lengths must '
        "name both 'inputs' and 'targets'"
      )
    arguments = {
      'return_all_decodes': False,
      'num_decodes': 1,
    } | _with_bindings(
      _DecoderOnlyModel.predict_batch_with_aux,
      rng=rng,
      decoder_params=decoder_params,
      return_all_decodes=return_all_decodes,
      num_decodes=num_decodes,
    )
    inputs = batch['decoder_input_tokens'] * batch['decoder_causal_attention']
    # Inputs [0 5 6 0 7 0] have three tokens that are not 0: the prompt is
    # [0 5 6 0], and the 7 after it is forced.
    starts = jnp.sum(inputs[:, 1:] != 0, axis=1, dtype=jnp.int32)
    prompt = decoding.prompt_of(None, inputs, starts)
    output = self._decode(params, prompt, inputs, inputs.shape[1], arguments)
    tokens = decoding.continuation(output, prompt)
    return _result(tokens, output, arguments['return_all_decodes'])


def _split(
  stock: type, args: tuple, kwargs: dict[str, Any]
) -> tuple[dict[str, Any], dict[str, Any]]:
  """Returns T5X's own arguments, and those of `decoding.decoder`."""
  # Arguments of the caller override gin's bindings for T5X's class.
  signature = inspect.signature(stock)
  keywords = {k: kwargs.pop(k) for k in signature.parameters if k in kwargs}
  arguments = signature.bind_partial(*args, **keywords).arguments
  arguments = (contract.bindings_of(stock) or {}) | arguments
  # The sampling options replace T5X's `decode_fn`.
  sampling = contract.sampling_of(arguments.pop('decode_fn', None))
  return arguments, sampling | kwargs


def _with_bindings(
  method: Callable[..., Any], **arguments: object
) -> dict[str, Any]:
  """Returns the arguments of a prediction that are set, over gin's bindings for
  T5X's own method."""
  is_set = {k: value for k, value in arguments.items() if value is not None}
  return (contract.bindings_of(method) or {}) | is_set


def _result(
  tokens: Array, output: DecodeOutput, return_all_decodes: bool
) -> tuple[Array, dict[str, Array]]:
  aux = decoding.counters(output)
  # `[B, num_decodes, L]` with one decode.
  if return_all_decodes:
    return tokens[:, None], aux | {'scores': aux['scores'][:, None]}
  return tokens, aux
