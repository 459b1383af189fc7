"""What drafts where little or nothing is said of drafters."""

import contextlib
from collections.abc import Mapping

from specdec_jax.assembly import models
from specdec_jax.assembly.drafters import DRAFTERS
from specdec_jax.assembly.option_fields import field_names
from specdec_jax.checkpoints import formats, loading, pretrained
from specdec_jax.models import families, presets


def drafter(checkpoint: str | None, sizes: str | None = None) -> str:
  """Names the drafter that the weights of a draft model are for, if only those
  are given: 'model' for a whole model, 'prompt_lookup' without any."""
  if not checkpoint:
    return 'prompt_lookup'
  kind = None
  if checkpoint.startswith(models.RANDOM):
    # The sizes of a whole model are among the others.
    with contextlib.suppress(ValueError):
      config = presets.drafter(checkpoint.removeprefix(models.RANDOM))
      kind = families.drafts_for(config)
  elif sizes is None:
    with contextlib.suppress(ValueError):
      found = formats.read_config(loading.locate(checkpoint))
      kind = families.drafts_for(found)
  return kind or 'model'


def shipped(
  target: str, options: Mapping[str, object], kind: str | None = None
) -> tuple[str | None, dict[str, object]]:
  """Returns the draft model that this package has for a target and a kind of
  drafter, and options: those given, where a value is None if nothing is said.

  Without a kind it is what drafts unasked, and the options have what is its
  own. It is None without such a model, or if an option is for another drafter.
  """
  models = pretrained.DRAFT_MODELS.get(target, ())
  if kind is not None:
    return {drafter(each): each for each in models}.get(kind), dict(options)
  found = next(
    (each for each in models if each in pretrained.DEFAULT_DRAFT_MODELS), None
  )
  mine = field_names(DRAFTERS[drafter(found)])
  others = {name for each in DRAFTERS.values() for name in field_names(each)}
  said = [name for name, value in options.items() if value is not None]
  if found is None or others.difference(mine).intersection(said):
    return None, dict(options)
  # Only chains are copied.
  is_tree = options.get('tree') is not None
  own = {} if is_tree else pretrained.DEFAULT_DRAFT_MODELS[found]
  return found, dict(options) | {
    name: value for name, value in own.items() if options.get(name) is None
  }
