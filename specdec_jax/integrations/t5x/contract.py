"""Checks the arguments that T5X passes to a model and to a decode_fn, and reads
gin's bindings of the T5X classes and functions that they replace.

gin applies a binding only to the class, method or function that it names, so
that a replacement has to look it up. T5X and gin are imported when needed.
"""

import functools
import inspect
import numbers
from collections.abc import Callable, Mapping
from typing import Any

from specdec_jax.base import Array
from specdec_jax.integrations.t5x.t5_networks import refusal

_SAMPLING = ('temperature', 'topk', 'topp')
# It changes the scores that T5X returns; speculative decoding always returns
# the model's log-probabilities.
_WITHOUT_EFFECT = ('rescale_log_probs',)


def decoder_params_of(
  arguments: Mapping[str, Any], vocabulary: Any
) -> tuple[Array | None, int]:
  """Returns the random key and the EOS id of a prediction, which may be in
  `decoder_params`; ValueError for unsupported arguments, or two keys."""
  check_num_decodes(arguments['num_decodes'])
  # Whatever is left after the supported keys is for another decoder.
  decoder_params = dict(arguments.get('decoder_params') or {})
  eos_id = decoder_params.pop('eos_id', vocabulary.eos_id or 1)
  key = decoder_params.pop('decode_rng', None)
  rng = arguments.get('rng')
  if decoder_params:
    raise refusal(
      f"decoder_params {sorted(decoder_params)} are of T5X's own decoders: set "
      'temperature, top_k and top_p of the model'
    )
  if key is not None and rng is not None:
    raise ValueError("pass either rng or decoder_params['decode_rng']")
  return rng if key is None else key, eos_id


def check_num_decodes(num_decodes: int) -> None:
  if num_decodes != 1:
    raise refusal(
      f'num_decodes is {num_decodes}: speculation decodes one sequence per '
      "row; remove it, or use T5X's own model, with temperature_sample or "
      'beam_search, for more'
    )


def check_causal(model: Any) -> None:
  """Raises ValueError if a decoder-only model attends to its inputs in both
  directions."""
  if getattr(model, '_inputs_bidirectional_attention', False):
    raise refusal(
      'inputs_bidirectional_attention: speculation decodes causal models only'
    )


def reach(tokens_to_logits: Any) -> tuple[Any, Any, Array | None]:
  """Returns T5X's model, its parameters and the encoder's tokens; ValueError
  unless the step is the partial method that T5X passes, of a causal model."""
  # T5X passes `partial(model._compute_logits_from_slice, params=..., ...)`.
  keywords = getattr(tokens_to_logits, 'keywords', {})
  model = getattr(getattr(tokens_to_logits, 'func', None), '__self__', None)
  needed = {'params', 'max_decode_length'}
  allowed = needed | {'encoded_inputs', 'raw_inputs'}
  attributes = ('module', 'output_vocabulary')
  lacking = [name for name in attributes if not hasattr(model, name)]
  if lacking or not needed <= set(keywords) <= allowed:
    raise refusal(
      'tokens_to_logits is not a functools.partial of a method of a T5X model '
      f'with the arguments {sorted(needed)} to {sorted(allowed)}: the model '
      f'lacks {lacking}, the arguments are {sorted(keywords)}. This version of '
      'T5X is not supported'
    )
  check_causal(model)
  return model, keywords['params'], keywords.get('raw_inputs')


def bindings_of(configurable: Any) -> dict[str, Any] | None:
  """Returns the arguments that gin binds for a class, method or function; None
  if no gin file names it."""
  import gin

  # An unregistered configurable is no error; an unresolvable reference is.
  try:
    gin.get_bindings(configurable, resolve_references=False)
  except ValueError:
    return None
  return gin.get_bindings(configurable)


def sampling_of(decode_fn: Callable[..., Any] | None) -> dict[str, Any]:
  """Returns the options of `decoding.decoder` that sample as T5X's `decode_fn`.

  `decode_fn` is `temperature_sample` or, for one beam, `beam_search`, with
  arguments bound by gin or by `functools.partial`; None for T5X's default.
  Raises ValueError for other functions and unsupported arguments.
  """
  if decode_fn is None:
    return {}
  from t5x import decoding

  function, arguments = _unwrapped(decode_fn)
  if function not in (decoding.temperature_sample, decoding.beam_search):
    raise refusal(
      f'decode_fn is {getattr(function, "__name__", function)}: speculation '
      'replaces only temperature_sample, and beam_search with one beam'
    )
  is_sampler = function is decoding.temperature_sample
  parameters = inspect.signature(function).parameters
  supported = (*_SAMPLING, *_WITHOUT_EFFECT) if is_sampler else ()
  unsupported = sorted(
    name
    for name, value in arguments.items()
    if name not in supported and value is not parameters[name].default
  )
  if unsupported:
    raise refusal(
      f'{function.__name__} has the arguments {unsupported}, which speculation '
      'does not support: remove them'
    )
  if not is_sampler:
    return {}
  # The defaults are T5X's: topk 1, which is greedy.
  values = [arguments.get(name, parameters[name].default) for name in _SAMPLING]
  for value in values:
    if not isinstance(value, numbers.Real):
      raise refusal(
        'temperature_sample has a temperature, topk or topp of type '
        f'{type(value).__name__}, and speculation takes numbers'
      )
  temperature, topk, topp = values
  if topk and topp:
    raise ValueError(
      f'temperature_sample has topk {topk} and topp {topp}, and T5X takes one '
      'of them: bind topk = 0, for its default is 1, or topp = 0.0'
    )
  if temperature <= float(decoding.MIN_TEMPERATURE):
    return {'temperature': 0.0}
  return {
    'temperature': float(temperature),
    'top_k': topk or None,
    'top_p': topp or None,
  }


def sampling_of_t5x() -> dict[str, Any]:
  """Returns `sampling_of` gin's `temperature_sample`, if it is bound."""
  try:
    from t5x import decoding
  except ImportError:
    return {}
  bound = bindings_of(decoding.temperature_sample)
  if not bound:
    return {}
  return sampling_of(functools.partial(decoding.temperature_sample, **bound))


def _unwrapped(decode_fn: Any) -> tuple[Any, dict[str, Any]]:
  """Returns the function, and the arguments that gin or partials bind."""
  arguments: dict[str, object] = {}
  # Of partial(partial(f, topk=1), topk=2): f, and topk 2.
  while isinstance(decode_fn, functools.partial):
    arguments = decode_fn.keywords | arguments
    decode_fn = decode_fn.func
  function = inspect.unwrap(decode_fn)
  if function is decode_fn:
    return function, arguments
  bound = bindings_of(decode_fn)
  if bound is None:
    raise refusal(
      'decode_fn is in a scope of gin, whose bindings cannot be read: bind '
      'temperature, top_k and top_p of the model instead'
    )
  return function, bound | arguments
