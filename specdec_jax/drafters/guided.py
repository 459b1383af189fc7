"""A drafter that knows what the grammar of a row leaves to say."""

from specdec_jax import grammars
from specdec_jax.base import Array, Arrays, Context, Draft, Drafter


def guided(drafter: Drafter) -> Drafter:
  """Extends a drafter's chains by the tokens that a grammar guesses; see
  `grammars.guided`. Without a grammar, and for trees, drafts are unchanged:
  whoever draws from masked probabilities finds an only token by itself.
  """
  if drafter.tree is not None or not drafter.gamma:
    return drafter

  def propose(
    params: Arrays, row_keys: Array, context: Context, *state: Arrays
  ) -> tuple[Draft, Arrays]:
    draft, own = drafter.propose(params, row_keys, context, *state)
    if context.grammar is not None:
      draft = grammars.guided(draft, context.grammar)
    return draft, own

  return drafter._replace(propose=propose)
