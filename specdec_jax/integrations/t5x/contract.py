"""What T5X passes to a model and to a decode_fn, checked (needs no T5X)."""

import difflib
from collections.abc import Iterable, Mapping
from typing import Any

from specdec_jax.base import Array
from specdec_jax.integrations.t5x.t5_networks import WHERE_TO_READ


def decoder_params_of(
  asked: Mapping[str, Any], vocabulary: Any
) -> tuple[Array | None, int]:
  """The key and the id of EOS of a prediction.

  Args:
    asked: `num_decodes`, and perhaps `rng` and `decoder_params`, in which T5X's
      callers may pass a key and the id as well.
    vocabulary: of the output.

  Raises:
    ValueError: if more than one decode is asked for, two keys are given, or a
      parameter of another decoder.
  """
  check_num_decodes(asked['num_decodes'])
  given = dict(asked.get('decoder_params') or {})
  eos_id = given.pop('eos_id', vocabulary.eos_id or 1)
  key, rng = given.pop('decode_rng', None), asked.get('rng')
  if given:
    raise ValueError(
      f"decoder_params {sorted(given)} are of T5X's own decoders: set "
      f'temperature, top_k and top_p of the model; {WHERE_TO_READ}'
    )
  if key is not None and rng is not None:
    raise ValueError("pass either rng or decoder_params['decode_rng']")
  return rng if key is None else key, eos_id


def check_num_decodes(num_decodes: int) -> None:
  """Raises ValueError unless one decode per row is asked for."""
  if num_decodes != 1:
    raise ValueError(
      f'num_decodes is {num_decodes}: speculation decodes one sequence per '
      "row; remove it, or use T5X's own model, with temperature_sample or "
      f'beam_search, for more; {WHERE_TO_READ}'
    )


def check_names(given: Iterable[str], known: Iterable[str], owner: str) -> None:
  """Raises ValueError if an argument is given that `owner` does not take."""
  known = sorted(known)
  for name in given:
    if name in known:
      continue
    near = difflib.get_close_matches(name, known, n=1)
    guess = f', did you mean {near[0]!r}?' if near else '.'
    raise ValueError(
      f'{owner} has no argument {name!r}{guess} It takes {", ".join(known)}'
    )


def check_causal(model: Any) -> None:
  """Raises ValueError if a decoder-only model sees its inputs as a whole."""
  if getattr(model, '_inputs_bidirectional_attention', False):
    raise ValueError(
      'inputs_bidirectional_attention: speculation decodes causal models '
      f'only; {WHERE_TO_READ}'
    )


def reach(tokens_to_logits: Any) -> tuple[Any, Any, Array | None]:
  """T5X's model, its parameters and the encoder's tokens.

  Raises:
    ValueError: if the step is not the partial method that T5X passes, or the
      model is not causal.
  """
  keywords = getattr(tokens_to_logits, 'keywords', {})
  model = getattr(getattr(tokens_to_logits, 'func', None), '__self__', None)
  for name in ('module', 'output_vocabulary'):
    if not hasattr(model, name):
      raise ValueError(
        'tokens_to_logits is not a functools.partial of a method of a T5X '
        f'model: there is no {name}. This T5X is not the one that speculation '
        f'was made for; {WHERE_TO_READ}'
      )
  needed = {'params', 'max_decode_length'}
  allowed = needed | {'encoded_inputs', 'raw_inputs'}
  if not needed <= set(keywords) <= allowed:
    raise ValueError(
      f'tokens_to_logits has the arguments {sorted(keywords)}, and '
      f'{sorted(needed)} to {sorted(allowed)} were expected. This T5X is not '
      f'the one that speculation was made for; {WHERE_TO_READ}'
    )
  check_causal(model)
  return model, keywords['params'], keywords.get('raw_inputs')
