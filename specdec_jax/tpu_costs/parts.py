"""What a target and a drafter cost on a TPU slice that need not be there.

The parts of an iteration are lowered with the project's own sharding rules and
compiled apart: a plain step, the loop's step for some widths with the drafting
left out, and the drafter's steps. Their memory is held against the chip's
before and after.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from specdec_jax import distributions, drafters, logits, verification
from specdec_jax.base import Params
from specdec_jax.decoding import speculative
from specdec_jax.measure import stopwatch
from specdec_jax.theory import planner
from specdec_jax.theory.planner import Costs
from specdec_jax.tpu_costs import aot
from specdec_jax.tpu_costs import workload as workload_lib
from specdec_jax.tpu_costs.aot import Job, ProgramCost
from specdec_jax.tpu_costs.workload import Shapes, Workload

_TO_PROBS = logits.standardize(temperature=1.0)


@dataclasses.dataclass(frozen=True, kw_only=True)
class PairCosts:
  """The parts of an iteration on each chip.

  Attributes:
    widths: positions of the target calls that were compiled, 1 first.
    target: cost of each.
    first_draft: of an iteration's first drafted token.
    further_draft: of each other one.
    memory: bytes on each chip by name; temporaries are those of the part that
      needs most.
    notes: what was decided on the way, in sentences.
  """

  widths: tuple[int, ...]
  target: tuple[ProgramCost, ...]
  first_draft: ProgramCost
  further_draft: ProgramCost
  memory: dict[str, int]
  notes: tuple[str, ...]

  def costs(self) -> Costs:
    """As the planner takes them; the loop's own cost is in the target's."""
    return Costs(
      widths=self.widths,
      target_seconds=[cost.seconds for cost in self.target],
      first_draft_seconds=self.first_draft.seconds,
      draft_seconds=self.further_draft.seconds,
      c_hat=self.further_draft.flops / self.target[0].flops,
    )


def pair_costs(
  workload: Workload,
  *,
  max_gamma: int,
  advance: Callable[[int], None] = lambda num_done: None,
) -> PairCosts:
  """Compiles the parts of an iteration and prices them.

  Args:
    workload: what is to be decoded.
    max_gamma: the widest target call has one position more; a middle one is
      compiled too.
    advance: called with 1 after each of the `num_parts(max_gamma)` programs.

  Raises:
    ValueError: if the workload does not fit on the chips, in bytes, or cannot
      be split over them.
  """
  notes: list[str] = []
  target, draft = (
    workload_lib.model_shapes(workload, config, max_gamma, notes)
    for config in (workload.target, workload.draft)
  )
  memory = {
    'target_params': aot.tree_bytes(target.params),
    'draft_params': aot.tree_bytes(draft.params),
    'caches': aot.tree_bytes((target.cache, draft.cache)),
  }
  memory['total'] = sum(memory.values())
  memory['available'] = int(workload.slice.chip.memory_bytes)
  _check_fits(workload, memory)
  widths = planner.widths_to_time(max_gamma)
  jobs = [_target_step(workload, target, width) for width in widths]
  jobs += [_first_draft(workload, draft), _further_draft(workload, draft)]
  costs = aot.price(
    aot.compile_all(jobs, advance),
    workload.slice.chip,
    [1 if job.mesh is None else workload.num_partitions for job in jobs],
  )
  memory['temporaries'] = max(cost.temporary_bytes for cost in costs)
  memory['total'] += memory['temporaries']
  _check_fits(workload, memory)
  *on_target, first, further = costs
  return PairCosts(
    widths=widths,
    target=tuple(on_target),
    first_draft=first,
    further_draft=further,
    memory=memory,
    notes=tuple(notes),
  )


def num_parts(max_gamma: int) -> int:
  """How many programs `pair_costs` compiles."""
  return len(planner.widths_to_time(max_gamma)) + 2


def _target_step(workload: Workload, target: Shapes, width: int) -> Job:
  """A step of the loop on drafts that cost nothing; at width 1 a plain one."""
  models: dict[str, Any] = {
    'target': target.model,
    'drafter': stopwatch.always_full(width - 1),
  }

  def step(params, state):
    return speculative.step(
      Params(params),
      state,
      **models,
      verify_fn=verification.speculative_sampling,
      logits_to_probs=_TO_PROBS,
      eos_id=1,
    )[0]

  state = _first_state(workload, target, Params(target.params), **models)
  return Job(step, (target.params, state), target.mesh, donated=(1,))


def _first_draft(workload: Workload, draft: Shapes) -> Job:
  """The drafter's catch-up call and the token drawn after it."""
  drafter = drafters.autoregressive(
    draft.model, gamma=1, logits_to_probs=_TO_PROBS
  )

  def step(params, cache, keys, context):
    return drafter.propose(params, keys, context, cache)

  params = Params(draft.params, draft.params)
  state = _first_state(
    workload, draft, params, target=draft.model, drafter=drafter
  )
  args = draft.params, draft.cache, state.row_keys, state.context
  return Job(step, args, draft.mesh, donated=(1,))


def _first_state(
  workload: Workload, shapes: Shapes, params: Params, **models: Any
) -> Any:
  """The shapes of the loop's state after the prefill."""
  state = jax.eval_shape(
    functools.partial(speculative.init, **models, max_len=workload.max_len),
    params,
    workload_lib.key_shape(workload),
    shapes.prompt,
  )
  return workload_lib.on_mesh(workload, state)


def _further_draft(workload: Workload, draft: Shapes) -> Job:
  """One call for one position, and a token drawn after it."""

  def step(params, cache, keys, tokens):
    raw, cache = draft.model.extend(params, tokens[:, None], cache)
    probs = _TO_PROBS(raw[:, 0])
    return (distributions.sample(keys, probs), probs), cache

  tokens = jax.ShapeDtypeStruct((workload.batch_size,), jnp.int32)
  keys = jax.eval_shape(
    lambda: jax.random.split(jax.random.key(0), workload.batch_size)
  )
  beside = workload_lib.on_mesh(workload, (keys, tokens))
  args = draft.params, draft.cache, *beside
  return Job(step, args, draft.mesh, donated=(1,))


def _check_fits(workload: Workload, memory: dict[str, int]) -> None:
  if memory['total'] <= memory['available']:
    return
  parts = ', '.join(
    f'{size / 2**30:.2f} GiB of {name.replace("_", " ")}'
    for name, size in memory.items()
    if name not in ('total', 'available')
  )
  raise ValueError(
    f'{memory["total"]} bytes do not fit on a chip of '
    f'{workload.slice.name}, which has {memory["available"]}: {parts}'
  )
