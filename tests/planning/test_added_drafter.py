"""`plan` with drafters that a user adds, as docs/extending.md says."""

from specdec_jax.assembly import decoder as decoder_lib
from specdec_jax.assembly.models import Model
from specdec_jax.assembly.text_settings import TextSettings
from tests.assembly.test_extending import added, folder  # noqa: F401
from tests.planning import test_aot


def test_plan_prices_it(added, folder):  # noqa: F811
  """All parts of an iteration, from the choice alone; they are not compiled."""
  drafter = added.choice(model=Model(checkpoint=str(folder / added.name)))
  test_aot.check_parts(
    decoder_lib.outline(
      Model(checkpoint=str(folder / 'target')),
      drafter=drafter,
      sampling=TextSettings(temperature=1.0),
      is_dry_run=True,
    ),
    num_trees=0,
  )
