"""What gin binds for T5X's own models and decoders, where others stand in.

gin gives a binding to the class, method or function that it names and to no
other, so what takes its place has to look. T5X and gin, which T5X requires, are
imported when they are needed.
"""

import functools
import inspect
import numbers
from collections.abc import Callable
from typing import Any

from specdec_jax.integrations.t5x.t5_networks import WHERE_TO_READ

_SAMPLING = ('temperature', 'topk', 'topp')
# It says which scores T5X returns; those of speculation are the model's own.
_WITHOUT_EFFECT = ('rescale_log_probs',)


def of(configurable: Callable[..., Any]) -> dict[str, Any]:
  """The arguments that gin binds for a class, a method or a function."""
  return _known_to_gin(configurable) or {}


def sampling_of(decode_fn: Callable[..., Any] | None) -> dict[str, Any]:
  """Settings of `Speculation` that sample as a decoder of T5X's does.

  Args:
    decode_fn: `temperature_sample` or `beam_search`, with arguments bound by
      gin or by `functools.partial`; None is T5X's default. A beam search is
      answered by greedy decoding, for one beam is all that is asked of it.

  Raises:
    ValueError: if it is another decoder, or has arguments that speculation has
      no counterpart of.
  """
  if decode_fn is None:
    return {}
  from t5x import decoding

  function, given = _opened(decode_fn)
  if function not in (decoding.temperature_sample, decoding.beam_search):
    raise ValueError(
      f'decode_fn is {getattr(function, "__name__", function)}, and '
      'speculation takes the place of temperature_sample and of beam_search '
      f'with one beam only; {WHERE_TO_READ}'
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
    raise ValueError(
      f'{function.__name__} is given {others}, which speculation does not '
      f'support: remove them; {WHERE_TO_READ}'
    )
  if not is_sampler:
    return {}
  return _settings(
    **{name: given.get(name, parameters[name].default) for name in _SAMPLING},
    smallest=float(decoding.MIN_TEMPERATURE),
  )


def sampling_of_t5x() -> dict[str, Any]:
  """Settings that sample as gin binds T5X's `temperature_sample`; none if it
  binds nothing.

  Raises:
    ValueError: as `sampling_of`.
  """
  try:
    from t5x import decoding
  except ImportError:
    return {}
  bound = of(decoding.temperature_sample)
  if not bound:
    return {}
  return sampling_of(functools.partial(decoding.temperature_sample, **bound))


def _opened(decode_fn: Any) -> tuple[Any, dict[str, Any]]:
  """The function itself, and the arguments that it would be called with."""
  given: dict[str, Any] = {}
  while isinstance(decode_fn, functools.partial):
    given = decode_fn.keywords | given
    decode_fn = decode_fn.func
  function = inspect.unwrap(decode_fn)
  if function is decode_fn:
    return function, given
  bound = _known_to_gin(decode_fn)
  if bound is None:
    raise ValueError(
      'decode_fn is in a scope of gin, whose bindings cannot be read: bind '
      f'temperature, top_k and top_p of the model instead; {WHERE_TO_READ}'
    )
  return function, bound | given


def _settings(
  *, temperature: Any, topk: Any, topp: Any, smallest: float
) -> dict[str, Any]:
  for value in (temperature, topk, topp):
    if not isinstance(value, numbers.Real):
      raise ValueError(
        'temperature_sample has a temperature, topk or topp of type '
        f'{type(value).__name__}, and speculation takes numbers; '
        f'{WHERE_TO_READ}'
      )
  if topk and topp:
    raise ValueError(
      f'temperature_sample has topk {topk} and topp {topp}, and T5X takes one '
      'of them: bind topk = 0, for its default is 1, or topp = 0.0'
    )
  return {
    'temperature': float(temperature) if temperature > smallest else 0.0,
    'top_k': topk or None,
    'top_p': topp or None,
  }


def _known_to_gin(configurable: Any) -> dict[str, Any] | None:
  """What gin binds for it; None if no gin file names it."""
  import gin

  try:
    gin.get_bindings(configurable, resolve_references=False)
  except ValueError:
    return None
  return gin.get_bindings(configurable)
