"""What a decoder costs on a TPU slice that need not be there.

The parts of an iteration are compiled one by one, for arrays placed by the
project's sharding rules: a plain step; the loop's step without drafting, for
some widths and for trees of as many nodes; and the drafter's steps, for chains
and for each tree. Their memory is compared with the chip's before and after.
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
from specdec_jax.assembly.sampling import Sampling
from specdec_jax.base import Drafter, Params, Prompt, Tree
from specdec_jax.decoding.program import Part, Program
from specdec_jax.decoding.state import DecodeState
from specdec_jax.drafters.autoregressive import Chain
from specdec_jax.measure import stopwatch
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
  """A decoder's program for shapes that lie on the slice.

  Attributes:
    workload: what is decoded.
    program: what is compiled of its loop.
    chain: what drafts token after token, if anything does.
    own: the drafter's own parameters.
    draft_mesh: None if every chip has a whole copy of the drafter.
    note: why that is so, else empty.
  """

  workload: Workload
  program: Program
  chain: Chain | None
  own: Any
  draft_mesh: Mesh | None
  note: str = ''


def shapes_of(workload: Workload, length: Length) -> Shapes:
  """Makes the decoder's program for drafts of a length; a drafter that does not
  divide over the mesh is replicated. ValueError if the target or the batch does
  not."""
  decoder, mesh = workload.decoder, workload.mesh
  target_info = decoder.target_info
  if isinstance(length, Tree):
    # Trees consist of the likeliest tokens, as the planner's rates were
    # measured.
    target_info = dataclasses.replace(target_info, sampling=Sampling())
  made = decoder.choice.make(target_info, length)
  target = models.param_shapes(decoder.model, decoder.config)
  mesh_lib.check_divides(mesh, target, batch_size=workload.batch_size)
  shardings = mesh_lib.parameter_shardings(mesh, target)
  target = mesh_lib.with_shardings(target, shardings)
  own: Any = ()
  note = ''
  if made.config is not None:
    own = models.param_shapes(made.model, made.config)
    # A small draft model may have fewer heads than a copy has chips.
    try:
      mesh_lib.check_divides(mesh, own, batch_size=workload.batch_size)
    except ValueError as error:
      note = f'Every chip has the whole draft model, since {error}.'
    own = mesh_lib.with_shardings(own, mesh_lib.drafter_shardings(mesh, own))
  params = Params(target, made.join(target, own))

  def places(state: DecodeState) -> DecodeState:
    all_places: DecodeState = mesh_lib.state_shardings(mesh, state)
    drafter = mesh_lib.state_shardings(
      mesh, state.drafter_state, is_split=not note
    )
    return dataclasses.replace(all_places, drafter_state=drafter)

  program = Program(
    method=dataclasses.replace(
      decoder.method, target=made.target_of(target_info), drafter=made.drafter
    ),
    params=params,
    prompt=_prompt(workload),
    max_len=workload.max_len,
    places=places,
  )
  return Shapes(
    workload=workload,
    program=program,
    chain=made.chain,
    own=own or own_params(params),
    draft_mesh=None if note else mesh,
    note=note,
  )


def _prompt(workload: Workload) -> Prompt:
  # Where a program is traced, shapes will do for arrays.
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
    costs: of all of them, as the planner takes them.
    programs: of each, by name.
    memory: bytes on each chip by name; temporaries are those of the part that
      needs most.
    notes: what was decided on the way, in sentences.
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

  The widest target call has `max_gamma + 1` positions; a middle one is compiled
  too, and trees if `has_trees`. Raises ValueError if the workload does not fit
  on the chips, in bytes, or cannot be split over them, or the drafter does not
  draft `max_gamma` tokens.
  """
  whole = shapes_of(workload, Fixed(max_gamma))
  state = whole.program.state
  caches = state.target_cache, state.drafter_state
  memory = {
    'target_params': mesh_lib.tree_bytes(whole.program.params.target),
    'draft_params': mesh_lib.tree_bytes(whole.own),
    'caches': mesh_lib.tree_bytes(caches),
  }
  # Checked before anything is compiled: parameters and caches alone may exceed
  # the memory.
  memory['total'] = sum(memory.values())
  memory['available'] = int(workload.slice.chip.memory_bytes)
  _check_fits(workload, memory)
  shapes = tree_shapes(workload, max_gamma) if has_trees else []
  jobs = part_jobs(workload, whole, max_gamma, shapes)
  compiled = aot.compile_all(list(jobs.values()))
  costs = aot.price(compiled, workload.slice.chip)
  memory['temporaries'] = max(cost.temporary_bytes for cost in costs)
  memory['total'] += memory['temporaries']
  _check_fits(workload, memory)
  return PairCosts(
    costs=costs_of(max_gamma, costs, shapes, whole.chain is not None),
    programs=dict(zip(jobs, costs, strict=True)),
    memory=memory,
    notes=(whole.note,) if whole.note else (),
  )


def costs_of(
  max_gamma: int,
  parts: Sequence[ProgramCost],
  shapes: Sequence[Tree] = (),
  is_chain: bool = True,
) -> Costs:
  """Puts the costs of `part_jobs`, in their order, as the planner takes them;
  the loop's own cost is in the target's. Without `is_chain` the second draft is
  one of all tokens."""
  widths = widths_to_time(max_gamma)
  target = parts[: len(widths)]
  first, second, *of_trees = parts[len(widths) :]

  def further(name: str) -> float:
    one, cost = getattr(first, name), getattr(second, name)
    return cost if is_chain else per_token(one, cost, max_gamma)

  return Costs(
    widths=widths,
    target_seconds=[cost.seconds for cost in target],
    first_draft_seconds=first.seconds,
    draft_seconds=further('seconds'),
    c_hat=further('flops') / target[0].flops,
    tree_nodes=[len(tree.parents) for tree in shapes],
    # Of two trees: target call, draft, target call, draft.
    tree_seconds=[cost.seconds for cost in of_trees[::2]],
    level_seconds=[
      cost.seconds / trees.depth(tree)
      for tree, cost in zip(shapes, of_trees[1::2], strict=True)
    ],
  )


def part_jobs(
  workload: Workload, whole: Shapes, max_gamma: int, shapes: Iterable[Tree]
) -> dict[str, Job]:
  """Makes the programs of `pair_costs`, by name: target calls by width; a draft
  of one token, and a further token, or without a chain a draft of all; target
  call and draft of each tree."""
  decoder = workload.decoder
  jobs = {
    f'target, {width} positions': target_step(whole, width)
    for width in widths_to_time(max_gamma)
  }
  one = decoder.choice.make(decoder.target_info, Fixed(1)).drafter
  jobs['drafter, first token'] = _draft(whole, one)
  if whole.chain is None:
    jobs['drafter, all tokens'] = _draft(whole, whole.program.method.drafter)
  else:
    jobs['drafter, further token'] = _further_draft(whole, whole.chain)
  for tree in shapes:
    own, num_nodes = shapes_of(workload, tree), len(tree.parents)
    name = f'tree of {num_nodes} nodes'
    jobs[f'target, {name}'] = target_step(own, num_nodes + 1, tree)
    deep = f'drafter, {name}, {trees.depth(tree)} deep'
    jobs[deep] = _draft(own, own.program.method.drafter)
  return jobs


def tree_shapes(workload: Workload, max_gamma: int) -> list[Tree]:
  """Returns the trees to compile: for each width beyond 1 the best of as many
  nodes under a typical alpha, if the drafter drafts it."""
  rates = tree_theory.assumed_rates(tree_theory.DEFAULT_ALPHA)
  sizes = [width - 1 for width in widths_to_time(max_gamma)]
  # A width of 4 is the root and 3 nodes.
  best = [Tree(tree_theory.best_tree(rates, n, n)) for n in sizes if n > 1]
  return [tree for tree in best if _drafts(workload.decoder, tree)]


def _drafts(decoder: Decoder, tree: Tree) -> bool:
  """Tells whether a decoder's drafter drafts this very tree."""
  if not decoder.drafter.gamma:  # Plain decoding takes trees, and drafts none.
    return False
  greedy = dataclasses.replace(decoder.target_info, sampling=Sampling())
  try:
    return decoder.choice.make(greedy, tree).drafter.tree == tree
  except ValueError:
    return False


def target_step(shapes: Shapes, width: int, tree: Tree | None = None) -> Job:
  """Makes a step of the loop whose drafts, chains or trees, cost nothing; at
  width 1 it is a plain step."""
  program = shapes.program
  method = dataclasses.replace(
    program.method, drafter=stopwatch.always_full(width - 1, tree=tree)
  )
  if tree is not None:
    walk = functools.partial(verification.target_sample_walk, tree=tree)
    method = dataclasses.replace(method, verify_fn=walk)
  params = Params(program.params.target)
  alone = dataclasses.replace(program, method=method, params=params)
  return Job(alone.step(), shapes.workload.mesh)


def _draft(shapes: Shapes, drafter: Drafter) -> Job:
  """Makes a draft: the call that catches up, and all tokens drawn after it."""

  def step(params, cache, keys, context, *seen):
    return drafter.propose(params, keys, context, cache, *seen)

  params, state = shapes.program.params.drafter, shapes.program.state
  args = [params, state.drafter_state, state.row_keys, state.context]
  args += [state.target_cache] * drafter.reads_target_cache
  return Job(_in_place(step, *args), shapes.draft_mesh)


def _further_draft(shapes: Shapes, chain: Chain) -> Job:
  """Makes one call for one position, and draws a token after it."""
  params, state = shapes.program.params.drafter, shapes.program.state
  to_probs = shapes.program.method.logits_to_probs

  def step(params, cache, keys, tokens, left, *seen):
    fed = tokens[:, None], left, cache
    raw, left, cache = chain.extend(params, *fed, *seen)
    probs = to_probs(raw[:, 0])
    return (distributions.sample(keys, probs), probs, left), cache

  # `left`, such as EAGLE's guess of features, has the shapes that a catch-up
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
