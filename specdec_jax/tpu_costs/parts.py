"""What a target and a drafter cost on a TPU slice that need not be there.

The parts of an iteration are compiled apart, of shapes that lie where the
project's sharding rules put them: a plain step, the loop's step for some widths
without the drafting, and the drafter's steps; then the loop's step and the
whole draft of trees of as many nodes. Their memory is held against the chip's
before and after.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from specdec_jax import distributions, drafters, logits, trees, verification
from specdec_jax.base import (
  Drafter,
  LanguageModel,
  Params,
  Prompt,
  Tree,
)
from specdec_jax.decoding import speculative
from specdec_jax.decoding.method import Method
from specdec_jax.decoding.state import DecodeState
from specdec_jax.drafters.autoregressive import Chain, as_chain
from specdec_jax.measure import stopwatch
from specdec_jax.models import families
from specdec_jax.models.families import Config
from specdec_jax.sharding import mesh as mesh_lib
from specdec_jax.theory import trees as tree_theory
from specdec_jax.theory.costs import Costs, widths_to_time
from specdec_jax.tpu_costs import aot
from specdec_jax.tpu_costs.aot import Job, ProgramCost
from specdec_jax.tpu_costs.workloads import (
  Workload,
  key_shape,
  on_mesh,
  with_sharding,
)

_TO_PROBS = logits.standardize(temperature=1.0)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Shapes:
  """A model's arguments as shapes with shardings; `mesh` is None for a model
  that every chip has a whole copy of."""

  model: LanguageModel
  params: Any
  prompt: Prompt
  mesh: Mesh | None


def model_shapes(
  workload: Workload,
  config: Config,
  notes: list[str],
  model: LanguageModel | None = None,
) -> Shapes:
  """A model on the mesh, with its usual functions or with others; a draft model
  that does not divide is replicated, and `notes` get a sentence that says so.
  """
  params, mesh = _placed_params(workload, config, notes)
  model = model or families.with_logits_of(
    families.language_model(config), workload.target.vocab_size
  )
  prompt = _prompt_shapes(workload, config)
  return Shapes(model=model, params=params, prompt=prompt, mesh=mesh)


def _placed_params(
  workload: Workload, config: Any, notes: list[str]
) -> tuple[Any, Mesh | None]:
  """Parameters on the mesh, or whole on every chip and no mesh."""
  mesh, params = workload.mesh, families.param_shapes(config)
  try:
    mesh_lib.check_divides(mesh, params, batch_size=workload.batch_size)
    shardings = mesh_lib.parameter_shardings(mesh, params)
  except ValueError as error:
    if config is not workload.draft:
      raise
    notes.append(f'Every chip has the whole draft model, since {error}.')
    whole = NamedSharding(mesh, PartitionSpec())
    params = jax.tree.map(lambda leaf: with_sharding(leaf, whole), params)
    return params, None
  return jax.tree.map(with_sharding, params, shardings), mesh


@dataclasses.dataclass(frozen=True, kw_only=True)
class Drafts:
  """A drafter's arguments as shapes with shardings: its own parameters, those
  that it has in the loop, and the loop's state after the prefill."""

  drafter: Drafter
  chain: Chain
  own: Any
  params: Any
  state: DecodeState
  mesh: Mesh | None


def pair_shapes(
  workload: Workload,
  max_gamma: int,
  notes: list[str],
  tree: Tree | None = None,
) -> tuple[Shapes, Drafts]:
  """Target and drafter: a draft model, or one that reads features. It drafts
  `max_gamma` tokens, or a `tree` of its likeliest."""
  own, mesh = _placed_params(workload, workload.draft, notes)
  args = workload, workload.target, notes
  model: Any
  if families.drafts_for(workload.draft) is None:
    target, params = model_shapes(*args), own
    model = families.with_logits_of(
      families.language_model(workload.draft), workload.target.vocab_size
    )
  else:
    depth = max_gamma if tree is None else trees.depth(tree)
    bound = families.bind(workload.target, workload.draft, width=depth + 1)
    target = model_shapes(*args, bound.target)
    model, params = drafters.eagle(bound.model), bound.join(target.params, own)
  made: dict[str, Any] = {'logits_to_probs': _TO_PROBS}
  if tree is None:
    drafter = drafters.autoregressive(model, gamma=max_gamma, **made)
  else:
    drafter = drafters.branching(model, tree=tree, is_ranked=True, **made)
  state = _first_state(
    workload,
    target,
    Params(target.params, params),
    _method(target.model, drafter),
  )
  cache = on_mesh(workload, state.drafter_state, is_split=mesh is not None)
  return target, Drafts(
    drafter=drafter,
    chain=as_chain(model),
    own=own,
    params=params,
    state=dataclasses.replace(state, drafter_state=cache),
    mesh=mesh,
  )


def _prompt_shapes(workload: Workload, config: Config) -> Prompt:
  """A prompt's shapes; every row has its input length."""
  # A shape stands for an array wherever one is traced.
  array: Any = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.int32)
  batch_size, length = workload.batch_size, workload.input_length
  is_encoder = families.has_encoder(config)
  prompt = Prompt(
    encoder_tokens=array(batch_size, length) if is_encoder else None,
    decoder_tokens=array(batch_size, 1 if is_encoder else length),
    decoder_lengths=array(batch_size),
    row_ids=array(batch_size),
  )
  return on_mesh(workload, prompt)


@dataclasses.dataclass(frozen=True, kw_only=True)
class TreePart:
  """What a tree costs on each chip: the iteration that scores it, walks it and
  moves its path, and all of its drafting."""

  tree: Tree
  target: ProgramCost
  draft: ProgramCost


@dataclasses.dataclass(frozen=True, kw_only=True)
class PairCosts:
  """The parts of an iteration on each chip.

  Attributes:
    widths: positions of the target calls that were compiled, 1 first.
    target: cost of each.
    first_draft: of an iteration's first drafted token.
    further_draft: of each other one.
    trees: those of `tree_shapes`.
    memory: bytes on each chip by name; temporaries are those of the part that
      needs most.
    notes: what was decided on the way, in sentences.
  """

  widths: tuple[int, ...]
  target: tuple[ProgramCost, ...]
  first_draft: ProgramCost
  further_draft: ProgramCost
  trees: tuple[TreePart, ...]
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
      tree_nodes=[len(part.tree.parents) for part in self.trees],
      tree_seconds=[part.target.seconds for part in self.trees],
      level_seconds=[
        part.draft.seconds / trees.depth(part.tree) for part in self.trees
      ],
    )


def pair_costs(
  workload: Workload,
  *,
  max_gamma: int,
  advance: Callable[[int], None] = lambda num_done: None,
) -> PairCosts:
  """Compiles the parts of an iteration and prices them.

  The widest target call has `max_gamma + 1` positions; a middle one is compiled
  too. `advance` is called with 1 after each of the `num_parts(max_gamma)`
  programs. Raises ValueError if the workload does not fit on the chips, in
  bytes, or cannot be split over them.
  """
  notes: list[str] = []
  target, draft = pair_shapes(workload, max_gamma, notes)
  caches = draft.state.target_cache, draft.state.drafter_state
  memory = {
    'target_params': aot.tree_bytes(target.params),
    'draft_params': aot.tree_bytes(draft.own),
    'caches': aot.tree_bytes(caches),
  }
  memory['total'] = sum(memory.values())
  memory['available'] = int(workload.slice.chip.memory_bytes)
  _check_fits(workload, memory)
  jobs = part_jobs(workload, target, draft, max_gamma)
  costs = aot.price(
    aot.compile_all(jobs, advance),
    workload.slice.chip,
    [1 if job.mesh is None else workload.num_partitions for job in jobs],
  )
  memory['temporaries'] = max(cost.temporary_bytes for cost in costs)
  memory['total'] += memory['temporaries']
  _check_fits(workload, memory)
  widths, shapes = widths_to_time(max_gamma), tree_shapes(max_gamma)
  first, further, *of_trees = costs[len(widths) :]
  parts = zip(shapes, of_trees[::2], of_trees[1::2], strict=True)
  return PairCosts(
    widths=widths,
    target=tuple(costs[: len(widths)]),
    first_draft=first,
    further_draft=further,
    trees=tuple(TreePart(tree=t, target=a, draft=b) for t, a, b in parts),
    memory=memory,
    notes=tuple(notes),
  )


def part_jobs(
  workload: Workload, target: Shapes, draft: Drafts, max_gamma: int
) -> list[Job]:
  """The programs of `pair_costs`: target calls by width, drafts, and target
  call and draft of each tree."""
  widths = widths_to_time(max_gamma)
  jobs = [target_step(workload, target, width) for width in widths]
  first = drafters.autoregressive(
    draft.chain, gamma=1, logits_to_probs=_TO_PROBS
  )
  jobs += [_draft(draft, first), _further_draft(workload, draft)]
  for tree in tree_shapes(max_gamma):
    num_nodes = len(tree.parents)
    own_target, own = pair_shapes(workload, num_nodes, [], tree)
    jobs.append(target_step(workload, own_target, num_nodes + 1, tree))
    jobs.append(_draft(own, own.drafter))
  return jobs


def num_parts(max_gamma: int) -> int:
  """How many programs `pair_costs` compiles."""
  num_widths = len(widths_to_time(max_gamma))
  return num_widths + 2 + 2 * len(tree_shapes(max_gamma))


def tree_shapes(max_gamma: int) -> list[Tree]:
  """The trees that are compiled: for each width beyond 1 the best of as many
  nodes where only a typical alpha is known."""
  rates = tree_theory.assumed_rates(tree_theory.DEFAULT_ALPHA)
  sizes = [width - 1 for width in widths_to_time(max_gamma)]
  return [Tree(tree_theory.best_tree(rates, n, n)) for n in sizes if n > 1]


def target_step(
  workload: Workload, target: Shapes, width: int, tree: Tree | None = None
) -> Job:
  """A step of the loop on drafts that cost nothing, chains or trees; at width 1
  a plain one."""
  drafter = stopwatch.always_full(width - 1, tree=tree)
  method = _method(target.model, drafter)
  if tree is not None:
    walk = functools.partial(verification.target_sample_walk, tree=tree)
    method = dataclasses.replace(method, verify_fn=walk)

  def step(params, state):
    return speculative.step(Params(params), state, method=method)[0]

  state = _first_state(workload, target, Params(target.params), method)
  return Job(step, (target.params, state), target.mesh, donated=(1,))


def _draft(draft: Drafts, drafter: Drafter) -> Job:
  """A draft: the call that catches up, and all that is drawn after it."""

  def step(params, cache, keys, context, *seen):
    return drafter.propose(params, keys, context, cache, *seen)

  state = draft.state
  args = [draft.params, state.drafter_state, state.row_keys, state.context]
  args += [state.target_cache] * drafter.reads_target_cache
  return Job(step, tuple(args), draft.mesh, donated=(1,))


def _method(target: LanguageModel, drafter: Drafter) -> Method:
  return Method(
    target=target, drafter=drafter, logits_to_probs=_TO_PROBS, eos_id=1
  )


def _first_state(
  workload: Workload, shapes: Shapes, params: Params, method: Method
) -> Any:
  """The shapes of the loop's state after the prefill."""
  state = jax.eval_shape(
    functools.partial(
      speculative.init, method=method, max_len=workload.max_len
    ),
    params,
    key_shape(workload),
    shapes.prompt,
  )
  return on_mesh(workload, state)


def _further_draft(workload: Workload, draft: Drafts) -> Job:
  """One call for one position, and a token drawn after it."""
  chain, state = draft.chain, draft.state

  def step(params, cache, keys, tokens, left):
    raw, left, cache = chain.extend(params, tokens[:, None], left, cache)
    probs = _TO_PROBS(raw[:, 0])
    return (distributions.sample(keys, probs), probs, left), cache

  tokens = jax.ShapeDtypeStruct((workload.batch_size,), jnp.int32)
  seen = (state.target_cache,) if chain.reads_target_cache else ()
  caught_up = draft.params, state.context, state.drafter_state, *seen
  _, left, _ = jax.eval_shape(chain.catch_up, *caught_up)
  beside = state.row_keys, *on_mesh(workload, (tokens, left))
  args = draft.params, state.drafter_state, *beside
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
