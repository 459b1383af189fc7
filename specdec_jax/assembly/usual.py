"""The drafter, and the draft model, where users name none."""

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
  name = None
  if checkpoint.startswith(models.RANDOM):
    # The sizes of a whole model are among the others.
    with contextlib.suppress(ValueError):
      config = presets.drafter(checkpoint.removeprefix(models.RANDOM))
      name = families.drafts_for(config)
  elif sizes is None:
    with contextlib.suppress(ValueError):
      stored = formats.read_config(loading.locate(checkpoint))
      name = families.drafts_for(stored)
  return name or 'model'


def shipped(
  target: str, options: Mapping[str, object], drafter_name: str | None = None
) -> tuple[str | None, dict[str, object]]:
  """Returns the draft model that this package has for a target and a drafter,
  and the options; in `options`, None means not given.

  Without a name it is the default draft model, whose own options are added. It
  is None without such a model, or if an option is for another drafter.
  """
  draft_models = pretrained.DRAFT_MODELS.get(target, ())
  if drafter_name is not None:
    by_drafter = {drafter(model): model for model in draft_models}
    return by_drafter.get(drafter_name), dict(options)
  defaults = pretrained.DEFAULT_DRAFT_MODELS
  default = next((model for model in draft_models if model in defaults), None)
  if default is None or _is_for_another(drafter(default), options):
    return None, dict(options)
  # Only chains are copied.
  is_tree = options.get('tree') is not None
  added = {} if is_tree else defaults[default]
  missing = {
    name: value for name, value in added.items() if options.get(name) is None
  }
  return default, dict(options) | missing


def _is_for_another(name: str, options: Mapping[str, object]) -> bool:
  """Returns whether an option that is given is for other drafters alone."""
  names = {name for name, value in options.items() if value is not None}
  fields = {
    field for choice in DRAFTERS.values() for field in field_names(choice)
  }
  others_fields = fields.difference(field_names(DRAFTERS[name]))
  return not names.isdisjoint(others_fields)
