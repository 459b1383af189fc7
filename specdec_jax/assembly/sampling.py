"""How tokens are drawn, as every entry point says it."""

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from specdec_jax import base
from specdec_jax.assembly import processing
from specdec_jax.assembly.option_fields import field_names, option, plain
from specdec_jax.assembly.processing import Processing
from specdec_jax.base import LogitsToProbsFn
from specdec_jax.launch.numbers import count, number, share
from specdec_jax.launch.spelling import did_you_mean
from specdec_jax.sampling import logits

_MOST = 2**31 - 1
temperature = number(
  float,
  lambda x: x == 0 or logits.MIN_TEMPERATURE <= x < float('inf'),
  f'0, which is greedy, or a number of at least {logits.MIN_TEMPERATURE:g}',
)
# Options without effect in greedy decoding, with the values that switch them
# off, as in transformers and vLLM.
_OFF = {'top_k': 0, 'top_p': 1.0, 'min_p': 0.0, 'typical_p': 1.0}
LIMITS = tuple(_OFF)
_mass = number(float, lambda x: 0 < x <= 1, 'a number in (0, 1]; 1 keeps all')


@dataclasses.dataclass(frozen=True, kw_only=True)
class Drawing:
  """How logits become probabilities; see `logits.standardize`."""

  temperature: float = option(0.0, '0 is greedy', type=temperature)
  top_k: int | None = option(
    None, 'keep the k likeliest; 0 keeps all', type=count
  )
  top_p: float | None = option(
    None, 'keep the likeliest with this much mass; 1 keeps all', type=_mass
  )
  min_p: float | None = option(
    None,
    "keep those with at least this share of the likeliest's probability",
    type=share,
  )
  typical_p: float | None = option(
    None,
    'keep those with this much mass whose surprise is nearest the entropy',
    type=_mass,
  )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options(Processing, Drawing):
  """How tokens are drawn, as users say it: unchecked, None if unsaid."""


NAMES = tuple(field_names(Options))


def check_names(names: Iterable[str]) -> None:
  """Raises ValueError for a name that is no field of `Options`."""
  for name in names:
    if name not in NAMES:
      raise ValueError(
        f'{name!r} is no setting of how texts are sampled; these are '
        f'{", ".join(NAMES)}{did_you_mean(name, NAMES)}'
      )


def overriding(values: Mapping[str, Any]) -> dict[str, Any]:
  """Returns settings that override others; those of a greedy text also clear
  the limits, which are meant for its neighbours, and either name of the least
  length clears the other."""
  cleared = [*LIMITS] if values.get('temperature') == 0 else []
  least = 'min_new_tokens', 'min_length'
  if any(values.get(name) is not None for name in least):
    cleared += least
  return {**dict.fromkeys(cleared), **values}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sampling(Options):
  """How tokens are drawn: `Options`, checked."""

  def __post_init__(self):
    # A macro of gin is often a string by mistake, and `'0.5' < 1` would raise
    # TypeError.
    for name in ('temperature', *LIMITS):
      value = getattr(self, name)
      if isinstance(value, str | bool | list | tuple | dict):
        raise ValueError(f'{name} must be a number, got {value!r}')
    self.to_probs(1)  # Raises where a value is out of range.
    processing.check(self)

  @property
  def is_greedy(self) -> bool:
    return not self.temperature

  @property
  def drawing(self) -> 'Sampling':
    """What of it is compiled: the temperature and the limits."""
    return Sampling(
      **{name: getattr(self, name) for name in ('temperature', *LIMITS)}
    )

  def with_defaults(self, path: str, stated: Mapping[str, Any]) -> 'Sampling':
    """Fills what is not said by what the file `path` states; ValueError, which
    names the file, if a stated value is out of range."""
    missing = {n: x for n, x in stated.items() if getattr(self, n) is None}
    # The least length has two options: one that is given overrides both stated
    # ones.
    if self.min_new_tokens is not None or self.min_length is not None:
      missing.pop('min_length', None)
      missing.pop('min_new_tokens', None)
    try:
      return dataclasses.replace(self, **missing)
    except ValueError as error:
      raise ValueError(f'{path}: {error}') from error

  def to_probs(self, vocab_size: int) -> LogitsToProbsFn:
    """Makes the function from logits to probabilities of `vocab_size` ids."""
    draws = {name: self.used(name) for name in ('temperature', *LIMITS)}
    return logits.standardize(**draws, vocab_size=vocab_size)

  def used(self, name: str) -> Any:
    """Returns the temperature or one of `LIMITS`; None if it is not given, or
    switched off."""
    value = getattr(self, name)
    return None if value == _OFF.get(name) else value

  def check_has_room(self, name: str, most: int) -> None:
    """Raises ValueError if texts must be longer than a limit of this name."""
    if (least := self.min_new_tokens or 0) > most:
      raise ValueError(f'min_new_tokens {least} exceeds {name} {most}')

  def check_is_used(self) -> None:
    """Raises ValueError for a limit that changes nothing at temperature 0."""
    for name in LIMITS:
      value = self.used(name)
      if self.is_greedy and value is not None:
        raise ValueError(
          f'{name} {value:g} changes nothing at temperature 0: give a '
          'temperature above 0, or leave it out'
        )


def taken(options: dict[str, Any], **fields: Any) -> Sampling:
  """Makes a sampling of `fields` and of those that it takes out of `options`;
  raises as `Sampling`."""
  fields |= {name: options.pop(name) for name in NAMES if name in options}
  return Sampling(**plain(fields))


def of_rows(samplings: Sequence[Sampling], num_rows: int) -> base.Sampling:
  """Packs how each row of a batch is sampled; rows beyond `samplings`, which
  only fill the batch, keep all tokens."""
  filler = [Sampling(temperature=1.0)] * (num_rows - len(samplings))
  samplings = [*samplings, *filler]

  def column(name: str, dtype: type, default: float) -> base.Arrays:
    values = [sampling.used(name) for sampling in samplings]
    # A number beyond 32 bits means the same as the largest that fits.
    numbers = [default if x is None else min(x, _MOST) for x in values]
    return np.array(numbers, dtype)

  return base.Sampling(
    temperature=column('temperature', np.float32, 1),
    top_k=column('top_k', np.int32, _MOST),
    top_p=column('top_p', np.float32, 1),
    min_p=column('min_p', np.float32, 0),
    typical_p=column('typical_p', np.float32, 1),
  )
