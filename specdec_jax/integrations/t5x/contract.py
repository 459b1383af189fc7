"""What T5X passes to a model and to a decode_fn, checked, and what gin binds
for those of T5X's whose place they take (imports T5X and gin when needed).

gin gives a binding to the class, method or function that it names and to no
other, so what takes its place has to look.
"""

import functools
import inspect
import numbers
from collections.abc import Callable, Mapping
from typing import Any

from specdec_jax.base import Array
from specdec_jax.integrations.t5x.t5_networks import refusal

_SAMPLING = ('temperature', 'topk', 'topp')
# It changes the scores that T5X returns; those of speculation are the model's
# own.
_WITHOUT_EFFECT = ('rescale_log_probs',)


def decoder_params_of(
  asked: Mapping[str, Any], vocabulary: Any
) -> tuple[Array | None, int]:
  """Returns the key and the id of EOS of a prediction, also from
  `decoder_params`; ValueError for what speculation cannot do, or two keys."""
  check_num_decodes(asked['num_decodes'])
  # Known keys are taken out; what is left is for another decoder.
  given = dict(asked.get('decoder_params') or {})
  eos_id = given.pop('eos_id', vocabulary.eos_id or 1)
  key, rng = given.pop('decode_rng', None), asked.get('rng')
  if given:
    raise refusal(
      f"decoder_params {sorted(given)} are of T5X's own decoders: set "
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
  """Raises ValueError if a decoder-only model sees its inputs as a whole."""
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
  lacking = [
    x for x in ('module', 'output_vocabulary') if not hasattr(model, x)
  ]
  if lacking or not needed <= set(keywords) <= allowed:
    raise refusal(
      'tokens_to_logits is not a functools.partial of a method of a T5X model '
      f'with the arguments {sorted(needed)} to {sorted(allowed)}: the model '
      f'lacks {lacking}, the arguments are {sorted(keywords)}. This T5X is not '
      'the one that speculation was made for'
    )
  check_causal(model)
  return model, keywords['params'], keywords.get('raw_inputs')


def bindings_of(configurable: Any) -> dict[str, Any] | None:
  """Returns the arguments that gin binds for a class, a method or a function;
  None if no gin file names it."""
  import gin

  # Unknown to gin is no error; a reference that cannot be resolved is.
  try:
    gin.get_bindings(configurable, resolve_references=False)
  except ValueError:
    return None
  return gin.get_bindings(configurable)


def sampling_of(decode_fn: Callable[..., Any] | None) -> dict[str, Any]:
  """Returns the options of `decoding.decoder` that sample as a decoder of T5X's
  does.

  `decode_fn` is `temperature_sample` or, for one beam, `beam_search`, with
  arguments bound by gin or by `functools.partial`, or None for T5X's default.
  Raises ValueError for others, or arguments without a counterpart here.
  """
  if decode_fn is None:
    return {}
  from t5x import decoding

  function, given = _opened(decode_fn)
  if function not in (decoding.temperature_sample, decoding.beam_search):
    raise refusal(
      f'decode_fn is {getattr(function, "__name__", function)}, and '
      'speculation takes the place of temperature_sample and of beam_search '
      'with one beam only'
    )
  is_sampler = function is decoding.temperature_sample
  parameters = inspect.signature(function).parameters
  followed = (*_SAMPLING, *_WITHOUT_EFFECT) if is_sampler else ()
  others = sorted(
    name
    for name, value in given.items()
    if name not in followed and value is not parameters[name].default
  )
  if others:
    raise refusal(
      f'{function.__name__} is given {others}, which speculation does not '
      'support: remove them'
    )
  if not is_sampler:
    return {}
  # T5X's own defaults stand for what is not given: topk 1, which is greedy.
  values = [given.get(name, parameters[name].default) for name in _SAMPLING]
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


def _opened(decode_fn: Any) -> tuple[Any, dict[str, Any]]:
  """Returns the function, and the arguments that gin or partials give it."""
  given: dict[str, object] = {}
  # Of partial(partial(f, topk=1), topk=2): f, and topk 2.
  while isinstance(decode_fn, functools.partial):
    given = decode_fn.keywords | given
    decode_fn = decode_fn.func
  function = inspect.unwrap(decode_fn)
  if function is decode_fn:
    return function, given
  bound = bindings_of(decode_fn)
  if bound is None:
    raise refusal(
      'decode_fn is in a scope of gin, whose bindings cannot be read: bind '
      'temperature, top_k and top_p of the model instead'
    )
  return function, bound | given
