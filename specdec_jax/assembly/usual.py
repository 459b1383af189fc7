"""What drafts where nothing is said of drafters."""

import contextlib
from collections.abc import Mapping

from specdec_jax.assembly.drafters import DRAFTERS
from specdec_jax.assembly.option_fields import field_names
from specdec_jax.checkpoints import formats, loading, pretrained
from specdec_jax.models import families


def drafter(checkpoint: str | None, sizes: str | None = None) -> str:
  """Names the drafter that the weights of a draft model are for, if only those
  are given: 'model' for a whole model, 'prompt_lookup' without any."""
  if not checkpoint:
    return 'prompt_lookup'
  kind = None
  if sizes is None:
    with contextlib.suppress(ValueError):
      found = formats.read_config(loading.locate(checkpoint))
      kind = families.drafts_for(found)
  return kind or 'model'


def shipped(
  target: str, options: Mapping[str, object]
) -> tuple[str | None, dict[str, object]]:
  """Returns the draft model that this package has for a target, and options of
  its drafter: those given, where a value is None if nothing is said, and its
  own. Without such a model, or if an option is for another drafter, it is
  None."""
  found, own = pretrained.DRAFT_MODELS.get(target, (None, {}))
  mine = field_names(DRAFTERS[drafter(found)])
  others = {name for each in DRAFTERS.values() for name in field_names(each)}
  said = [name for name, value in options.items() if value is not None]
  if found is None or others.difference(mine).intersection(said):
    return None, dict(options)
  if options.get('tree') is not None:
    own = {}  # Only chains are copied.
  return found, dict(options) | {
    name: value for name, value in own.items() if options.get(name) is None
  }
