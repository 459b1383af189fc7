"""What `gamma='auto'` chooses for a category of prompts."""

from collections.abc import Mapping, Sequence

from specdec_jax.base import Prompt
from specdec_jax.measure import gamma_search, stopwatch
from specdec_jax.measure.gamma_search import Measurement
from specdec_jax.measure.loops import CompiledLoop

# Follows the name of a drafter in the table.
SUFFIX = '+auto'


def halves(
  batches: Sequence[Prompt],
) -> tuple[Sequence[Prompt], Sequence[Prompt]]:
  """Returns the batches that a gamma is chosen on, every other one, and those
  that it is reported on: what chose it has no part in its speed."""
  return batches[::2], batches[1::2]


def choose(
  plain: CompiledLoop,
  drafting: Mapping[int, CompiledLoop],
  batches: Sequence[Prompt],
) -> int:
  """Chooses as the package does, by `gamma_search.choose`.

  That is 0, plain decoding, unless a gamma is faster by a margin that grows
  with the error of so few rows; it may be one between those measured.

  Args:
    plain: plain decoding in the dtype that verifies.
    drafting: by gamma; all loops have run before.
    batches: decoded with each gamma twice.
  """
  loops = {0: plain, **drafting}

  def measurement(gamma: int, batch: Prompt) -> Measurement:
    loop = loops[gamma]
    state, fill_seconds = stopwatch.run_seconds(loop.prefill, batch)
    ended, seconds = stopwatch.run_seconds(loop.run, loop.params, state)
    return Measurement(
      gamma=gamma,
      statistics=ended.statistics,
      num_iterations=int(ended.statistics.num_target_runs.max()),
      fill_seconds=fill_seconds,
      loop_seconds=seconds,
    )

  return gamma_search.choose(
    sorted(loops),
    lambda gamma: [measurement(gamma, batch) for batch in batches],
    batch_size=batches[0].decoder_tokens.shape[0],
    waits=True,
  ).gamma
