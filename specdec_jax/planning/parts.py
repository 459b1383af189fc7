"""Predicts what a decoder costs on a TPU slice, without the hardware.

The parts of an iteration are compiled one by one, for arrays placed by the
project's sharding rules: a plain step; the loop's step without drafting, for
several widths and for trees of as many nodes; and the drafter's steps, for
chains and for each tree. Before and after, their memory is compared with that
of a chip.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from specdec_jax import trees, verification
from specdec_jax.assembly import models
from specdec_jax.assembly.decoder import Decoder, own_params
from specdec_jax.assembly.lengths import Fixed, Length
from specdec_jax.assembly.text_settings import TextSettings
from specdec_jax.base import Drafter, Params, Prompt, Tree
from specdec_jax.decoding.program import Part, Program
from specdec_jax.decoding.state import DecodeState
from specdec_jax.drafters.always_full import always_full
from specdec_jax.drafters.autoregressive import Chain
from specdec_jax.models import families
from specdec_jax.planning import aot
from specdec_jax.planning.aot import Job, ProgramCost
from specdec_jax.planning.workloads import Workload
from specdec_jax.sampling import distributions
from specdec_jax.sharding import mesh as mesh_lib
from specdec_jax.theory import trees as tree_theory
from specdec_jax.theory.costs import Costs, per_token, widths_to_time

_Tree = TypeVar('_Tree')


@dataclasses.dataclass(frozen=True, kw_only=True)
class Shapes:
  """A decoder's program, with the shapes of its arrays on the slice.

  Attributes:
    workload: what is decoded.
    program: the program to compile.
    chain: of a drafter that drafts token by token, else None.
    draft_params: the parameters that only the drafter has.
    draft_mesh: None if the drafter is replicated on every chip.
    note: why it is replicated, else empty.
  """

  workload: Workload
  program: Program
  chain: Chain | None
  draft_params: Any
  draft_mesh: Mesh | None
  note: str = ''


def shapes_of(workload: Workload, length: Length) -> Shapes:
  """Makes the decoder's program for drafts of a length.

  A drafter that does not divide over the mesh is replicated. ValueError if the
  target or the batch does not divide over it.
  """
  decoder, mesh = workload.decoder, workload.mesh
  target_info = decoder.parts.target_info
  if isinstance(length, Tree):
    # Trees consist of the likeliest tokens, as in the measurement of rank
    # rates.
    target_info = dataclasses.replace(target_info, sampling=TextSettings())
  drafting = decoder.recipe.drafter.make(target_info, length)
  target = models.param_shapes(decoder.model, decoder.config)
  mesh_lib.check_divides(mesh, target, batch_size=workload.batch_size)
  shardings = mesh_lib.parameter_shardings(mesh, target)
  target = mesh_lib.with_shardings(target, shardings)
  draft_params: Any = ()
  note = ''
  if drafting.config is not None:
    draft_params = models.param_shapes(drafting.model, drafting.config)
    # A small draft model may have fewer heads than there are chips per copy.
    try:
      mesh_lib.check_divides(mesh, draft_params, batch_size=workload.batch_size)
    except ValueError as error:
      note = f'Every chip has the whole draft model, since {error}.'
    draft_shardings = mesh_lib.drafter_shardings(mesh, draft_params)
    draft_params = mesh_lib.with_shardings(draft_params, draft_shardings)
  params = Params(target, drafting.join(target, draft_params))

  def state_places(state: DecodeState) -> DecodeState:
    places: DecodeState = mesh_lib.state_shardings(mesh, state)
    drafter = mesh_lib.state_shardings(
      mesh, state.drafter_state, is_split=not note
    )
    return dataclasses.replace(places, drafter_state=drafter)

  program = Program(
    method=dataclasses.replace(
      decoder.method,
      target=drafting.target_of(target_info),
      drafter=drafting.drafter,
    ),
    params=params,
    prompt=_prompt(workload),
    max_len=workload.max_len,
    places=state_places,
  )
  return Shapes(
    workload=workload,
    program=program,
    chain=drafting.chain,
    draft_params=draft_params or own_params(params),
    draft_mesh=None if note else mesh,
    note=note,
  )


def _prompt(workload: Workload) -> Prompt:
  # Shapes are enough to trace a program.
  array: Any = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.int32)
  batch_size, length = workload.batch_size, workload.input_length
  is_encoder = families.has_encoder(workload.decoder.config)
  prompt = Prompt(
    encoder_tokens=array(batch_size, length) if is_encoder else None,
    decoder_tokens=array(batch_size, 1 if is_encoder else length),
    decoder_lengths=array(batch_size),
    row_ids=array(batch_size),
  )
  return _as_state(workload, prompt)


def _as_state(workload: Workload, tree: _Tree) -> _Tree:
  """Returns a tree of shapes, rows first, sharded as the loop's state."""
  shardings = mesh_lib.state_shardings(workload.mesh, tree)
  return mesh_lib.with_shardings(tree, shardings)


@dataclasses.dataclass(frozen=True, kw_only=True)
class PairCosts:
  """The parts of an iteration on each chip.

  Attributes:
    costs: of all parts, for the planner.
    programs: the cost of each part, by name.
    memory: bytes on each chip by name; temporaries are those of the part that
      needs most.
    notes: sentences for the user.
  """

  costs: Costs
  programs: dict[str, ProgramCost]
  memory: dict[str, int]
  notes: tuple[str, ...]


def pair_costs(
  workload: Workload,
  *,
  max_gamma: int,
  has_trees: bool = True,
) -> PairCosts:
  """Compiles the parts of an iteration and prices them.

  Target calls have up to `max_gamma + 1` positions; trees are compiled if
  `has_trees`. ValueError if the workload does not fit in the memory of the
  chips or cannot be split over them, or the drafter does not draft `max_gamma`
  tokens.
  """
  chain_shapes = shapes_of(workload, Fixed(max_gamma))
  state = chain_shapes.program.state
  caches = state.target_cache, state.drafter_state
  memory = {
    'target_params': mesh_lib.tree_bytes(chain_shapes.program.params.target),
    'draft_params': mesh_lib.tree_bytes(chain_shapes.draft_params),
    'caches': mesh_lib.tree_bytes(caches),
  }
  # Parameters and caches alone may exceed the memory: checked before compiling.
  memory['total'] = sum(memory.values())
  memory['available'] = int(workload.slice.chip.memory_bytes)
  _check_fits(workload, memory)
  shapes = tree_shapes(workload, max_gamma) if has_trees else []
  jobs = part_jobs(workload, chain_shapes, max_gamma, shapes)
  compiled = aot.compile_all(list(jobs.values()))
  costs = aot.price(compiled, workload.slice.chip)
  memory['temporaries'] = max(cost.temporary_bytes for cost in costs)
  memory['total'] += memory['temporaries']
  _check_fits(workload, memory)
  return PairCosts(
    costs=costs_of(max_gamma, costs, shapes, chain_shapes.chain is not None),
    programs=dict(zip(jobs, costs, strict=True)),
    memory=memory,
    notes=(chain_shapes.note,) if chain_shapes.note else (),
  )


def costs_of(
  max_gamma: int,
  parts: Sequence[ProgramCost],
  shapes: Sequence[Tree] = (),
  is_chain: bool = True,
) -> Costs:
  """Converts the costs of `part_jobs`, in their order, to those of the planner.

  The cost of the loop is part of the target's. Without `is_chain` the second
  draft is one of all tokens.
  """
  widths = widths_to_time(max_gamma)
  target = parts[: len(widths)]
  first, second, *of_trees = parts[len(widths) :]

  def further(name: str) -> float:
    first_cost = getattr(first, name)
    second_cost = getattr(second, name)
    if is_chain:
      return second_cost
    return per_token(first_cost, second_cost, max_gamma)

  return Costs(
    widths=widths,
    target_seconds=[cost.seconds for cost in target],
    first_draft_seconds=first.seconds,
    draft_seconds=further('seconds'),
    c_hat=further('flops') / target[0].flops,
    tree_nodes=[len(tree.parents) for tree in shapes],
    # The order of two trees: target call, draft, target call, draft.
    tree_seconds=[cost.seconds for cost in of_trees[::2]],
    level_seconds=[
      cost.seconds / trees.depth(tree)
      for tree, cost in zip(shapes, of_trees[1::2], strict=True)
    ],
  )


def part_jobs(
  workload: Workload,
  chain_shapes: Shapes,
  max_gamma: int,
  shapes: Iterable[Tree],
) -> dict[str, Job]:
  """Makes the programs of `pair_costs`, by name: target calls by width; a draft
  of one token; a further token, or without a chain a draft of all tokens; and
  target call and draft of each tree."""
  decoder = workload.decoder
  jobs = {
    f'target, {width} positions': target_step(chain_shapes, width)
    for width in widths_to_time(max_gamma)
  }
  one = decoder.recipe.drafter.make(decoder.parts.target_info, Fixed(1)).drafter
  jobs['drafter, first token'] = _draft(chain_shapes, one)
  if chain_shapes.chain is None:
    jobs['drafter, all tokens'] = _draft(
      chain_shapes, chain_shapes.program.method.drafter
    )
  else:
    jobs['drafter, further token'] = _further_draft(
      chain_shapes, chain_shapes.chain
    )
  for tree in shapes:
    shapes_of_tree = shapes_of(workload, tree)
    num_nodes = len(tree.parents)
    name = f'tree of {num_nodes} nodes'
    jobs[f'target, {name}'] = target_step(shapes_of_tree, num_nodes + 1, tree)
    deep = f'drafter, {name}, {trees.depth(tree)} deep'
    jobs[deep] = _draft(shapes_of_tree, shapes_of_tree.program.method.drafter)
  return jobs


def tree_shapes(workload: Workload, max_gamma: int) -> list[Tree]:
  """Returns the trees to compile: for each width beyond 1 the best tree of as
  many positions for a typical alpha, if the drafter supports it."""
  rates = tree_theory.assumed_rates(tree_theory.DEFAULT_ALPHA)
  sizes = [width - 1 for width in widths_to_time(max_gamma)]
  # A width of 4 is the root and 3 nodes.
  best = [Tree(tree_theory.best_tree(rates, n, n)) for n in sizes if n > 1]
  return [tree for tree in best if _drafts(workload.decoder, tree)]


def _drafts(decoder: Decoder, tree: Tree) -> bool:
  """Returns whether a decoder's drafter drafts this tree."""
  if not decoder.drafter.gamma:
    return False
  target_info = decoder.parts.target_info
  greedy = dataclasses.replace(target_info, sampling=TextSettings())
  try:
    return decoder.recipe.drafter.make(greedy, tree).drafter.tree == tree
  except ValueError:
    return False


def target_step(shapes: Shapes, width: int, tree: Tree | None = None) -> Job:
  """Makes a step of the loop with drafts that cost nothing; at width 1 it is a
  plain step."""
  program = shapes.program
  method = dataclasses.replace(
    program.method, drafter=always_full(width - 1, tree=tree)
  )
  if tree is not None:
    walk = functools.partial(verification.target_sample_walk, tree=tree)
    method = dataclasses.replace(method, verify_fn=walk)
  params = Params(program.params.target)
  alone = dataclasses.replace(program, method=method, params=params)
  return Job(alone.step(), shapes.workload.mesh)


def _draft(shapes: Shapes, drafter: Drafter) -> Job:
  """Makes a draft: the call that catches up, and the sampling of all tokens."""

  def step(params, cache, keys, context, *seen):
    return drafter.propose(params, keys, context, cache, *seen)

  params, state = shapes.program.params.drafter, shapes.program.state
  args = [params, state.drafter_state, state.row_keys, state.context]
  args += [state.target_cache] * drafter.reads_target_cache
  return Job(_in_place(step, *args), shapes.draft_mesh)


def _further_draft(shapes: Shapes, chain: Chain) -> Job:
  """Makes a call of the drafter for one position, and samples a token."""
  params, state = shapes.program.params.drafter, shapes.program.state
  to_probs = shapes.program.method.logits_to_probs

  def step(params, cache, keys, tokens, left, *seen):
    fed = tokens[:, None], left, cache
    raw, left, cache = chain.extend(params, *fed, *seen)
    probs = to_probs(raw[:, 0])
    return (distributions.sample(keys, probs), probs, left), cache

  # `left`, such as EAGLE's predicted features, has the shapes that `catch_up`
  # returns.
  workload = shapes.workload
  tokens = jax.ShapeDtypeStruct((workload.batch_size,), jnp.int32)
  seen = (state.target_cache,) if chain.reads_target_cache else ()
  caught_up = params, state.context, state.drafter_state, *seen
  _, left, _ = jax.eval_shape(chain.catch_up, *caught_up)
  beside = state.row_keys, *_as_state(workload, (tokens, left)), *seen
  part = _in_place(step, params, state.drafter_state, *beside)
  return Job(part, shapes.draft_mesh)


def _in_place(step: Callable[..., Any], *args: Any) -> Part:
  """Makes a program that may overwrite its second argument, the cache."""
  return Part(jax.jit(step, donate_argnums=1), args)


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
