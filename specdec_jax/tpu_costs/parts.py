"""What a target and a drafter cost on a TPU slice that need not be there.

The parts of an iteration are compiled apart, of shapes that lie where the
project's sharding rules put them: a plain step, the loop's step for some widths
without the drafting, and the drafter's steps. Their memory is held against the
chip's before and after.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from specdec_jax import distributions, drafters, logits, verification
from specdec_jax.base import LanguageModel, Params, Prompt, Tree, VerifyFn
from specdec_jax.decoding import speculative
from specdec_jax.decoding.state import DecodeState
from specdec_jax.drafters.autoregressive import Chain, as_chain
from specdec_jax.measure import stopwatch
from specdec_jax.models import families
from specdec_jax.models.eagle import EagleConfig
from specdec_jax.models.families import Config
from specdec_jax.sharding import mesh as mesh_lib
from specdec_jax.sharding import rules
from specdec_jax.theory import planner
from specdec_jax.theory.planner import Costs
from specdec_jax.tpu_costs import aot
from specdec_jax.tpu_costs.aot import Job, ProgramCost, Slice

_TO_PROBS = logits.standardize(temperature=1.0)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Workload:
  """What is to be decoded, and on what; raises ValueError for a number below 1.

  The dtype of `target` is that of weights and caches. `input_length` counts
  tokens of the encoder, or of a decoder-only model's prompt, `output_length`
  new tokens per row, `num_partitions` the chips that share a copy of the
  target.
  """

  slice: Slice
  target: Config
  draft: Config | EagleConfig
  batch_size: int
  input_length: int
  output_length: int
  num_partitions: int

  def __post_init__(self):
    numbers = ('batch_size', 'input_length', 'output_length', 'num_partitions')
    for name in numbers:
      if (value := getattr(self, name)) < 1:
        raise ValueError(f'{name} must be at least 1, got {value}')
    length = max(self.input_length, self.max_len)
    for config in (self.target, self.draft):
      limit = families.of(config).max_positions(config)
      if limit is not None and length > limit:
        raise ValueError(
          f'input_length {self.input_length} and output_length '
          f'{self.output_length} make {length} positions; a '
          f'{families.of(config).name} of these sizes has {limit}'
        )

  @property
  def max_len(self) -> int:
    """The longest that a row can be."""
    is_encoder = families.has_encoder(self.target)
    return (1 if is_encoder else self.input_length) + self.output_length

  @property
  def mesh(self) -> Mesh:
    return mesh_lib.make(
      num_partitions=self.num_partitions, devices=self.slice.devices
    )


def default_num_partitions(slice_: Slice, batch_size: int) -> int:
  """The mesh's default, or more chips per copy where the batch has too few
  rows to go round."""
  size = len(slice_.devices)
  partitions = mesh_lib.make(devices=slice_.devices).shape[rules.MODEL]
  while batch_size % (size // partitions) and partitions < size:
    partitions *= 2
  return partitions


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
    params = jax.tree.map(lambda leaf: _with_sharding(leaf, whole), params)
    return params, None
  return jax.tree.map(_with_sharding, params, shardings), mesh


@dataclasses.dataclass(frozen=True, kw_only=True)
class Drafts:
  """A drafter's arguments as shapes with shardings: its own parameters, those
  that it has in the loop, and the loop's state after the prefill."""

  chain: Chain
  own: Any
  params: Any
  state: DecodeState
  mesh: Mesh | None


def pair_shapes(
  workload: Workload, max_gamma: int, notes: list[str]
) -> tuple[Shapes, Drafts]:
  """Target and drafter: a draft model, or one that reads features."""
  with_features = families.of(workload.draft).with_features
  own, mesh = _placed_params(workload, workload.draft, notes)
  args = workload, workload.target, notes
  if with_features is None:
    target, params = model_shapes(*args), own
    model = families.with_logits_of(
      families.language_model(workload.draft), workload.target.vocab_size
    )
    chain = as_chain(model)
  else:
    keeping, network = with_features(
      workload.target, workload.draft, width=max_gamma + 1
    )
    target, chain = model_shapes(*args, keeping), drafters.eagle(network)
    embedder = target.params['token_embedder']
    params = {'eagle': own, 'token_embedder': embedder}
  drafter = drafters.autoregressive(
    chain, gamma=max_gamma, logits_to_probs=_TO_PROBS
  )
  state = _first_state(
    workload,
    target,
    Params(target.params, params),
    target=target.model,
    drafter=drafter,
  )
  cache = on_mesh(workload, state.drafter_state, is_split=mesh is not None)
  return target, Drafts(
    chain=chain,
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


def _with_sharding(leaf: Any, sharding: Any) -> jax.ShapeDtypeStruct:
  return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)


def on_mesh(workload: Workload, tree: Any, *, is_split: bool = True) -> Any:
  """Rows over `data`, the heads of caches over `model`."""
  mesh = workload.mesh

  def place(leaf: Any) -> jax.ShapeDtypeStruct:
    heads = 'heads' if leaf.ndim == 4 and is_split else None
    axes = ('batch', heads, *[None] * leaf.ndim)[: leaf.ndim]
    spec = rules.fitting_spec(mesh, leaf.shape, axes)
    return _with_sharding(leaf, NamedSharding(mesh, spec))

  return jax.tree.map(place, tree)


def key_shape(workload: Workload) -> Any:
  """A random key's."""
  return on_mesh(workload, jax.eval_shape(lambda: jax.random.key(0)))


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
  *on_target, first, further = costs
  return PairCosts(
    widths=planner.widths_to_time(max_gamma),
    target=tuple(on_target),
    first_draft=first,
    further_draft=further,
    memory=memory,
    notes=tuple(notes),
  )


def part_jobs(
  workload: Workload, target: Shapes, draft: Drafts, max_gamma: int
) -> list[Job]:
  """The programs of `pair_costs`: target calls by width, then drafts."""
  widths = planner.widths_to_time(max_gamma)
  jobs = [target_step(workload, target, width) for width in widths]
  return [*jobs, _first_draft(draft), _further_draft(workload, draft)]


def num_parts(max_gamma: int) -> int:
  """How many programs `pair_costs` compiles."""
  return len(planner.widths_to_time(max_gamma)) + 2


def target_step(
  workload: Workload, target: Shapes, width: int, tree: Tree | None = None
) -> Job:
  """A step of the loop on drafts that cost nothing, chains or trees; at width 1
  a plain one."""
  drafter = stopwatch.always_full(width - 1, tree=tree)
  models: dict[str, Any] = {'target': target.model, 'drafter': drafter}
  verify_fn: VerifyFn = verification.speculative_sampling
  if tree is not None:
    verify_fn = functools.partial(verification.target_sample_walk, tree=tree)

  def step(params, state):
    return speculative.step(
      Params(params),
      state,
      **models,
      verify_fn=verify_fn,
      logits_to_probs=_TO_PROBS,
      eos_id=1,
    )[0]

  state = _first_state(workload, target, Params(target.params), **models)
  return Job(step, (target.params, state), target.mesh, donated=(1,))


def _first_draft(draft: Drafts) -> Job:
  """The drafter's catch-up call and the token drawn after it."""
  drafter = drafters.autoregressive(
    draft.chain, gamma=1, logits_to_probs=_TO_PROBS
  )

  def step(params, cache, keys, context, *seen):
    return drafter.propose(params, keys, context, cache, *seen)

  state = draft.state
  args = [draft.params, state.drafter_state, state.row_keys, state.context]
  args += [state.target_cache] * drafter.reads_target_cache
  return Job(step, tuple(args), draft.mesh, donated=(1,))


def _first_state(
  workload: Workload, shapes: Shapes, params: Params, **models: Any
) -> Any:
  """The shapes of the loop's state after the prefill."""
  state = jax.eval_shape(
    functools.partial(speculative.init, **models, max_len=workload.max_len),
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
