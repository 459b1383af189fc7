"""How `infer` decodes: from a gin file's choices to compiled programs."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from specdec_jax import logits, verification
from specdec_jax.base import Draft, LanguageModel, Params, Prompt, VerifyFn
from specdec_jax.infer import decode_many, infer_models
from specdec_jax.infer.decode_many import Programs
from specdec_jax.infer.infer_models import Drafting, MakeDrafter, Model, Target
from specdec_jax.models.families import Config
from specdec_jax.sharding import mesh as mesh_lib
from specdec_jax.text.vocabulary_files import AnyVocabulary


@dataclasses.dataclass(frozen=True, kw_only=True)
class Decoding:
  """How to decode; gin binds the fields.

  Attributes:
    make_drafter: gives the drafter; see `infer_models`.
    verify_fn: the acceptance rule, of `verification`.
    temperature: of the sampling; 0 is greedy.
    rule_temperature: of the target's laws that the rule sees, if another: 1 for
      lenient greedy decoding, whose rule takes the argmax itself.
    top_k: keeps the k likeliest tokens.
    top_p: keeps the likeliest with this much mass.
    min_p: keeps tokens with at least this share of the likeliest's probability.
    seed: of all draws; each example has its own stream.
    batch_size: rows decoded at once, on all chips together.
    refill_size: rows that are refilled at once; None for a quarter. All of them
      makes every batch wait for its slowest row.
  """

  make_drafter: MakeDrafter = infer_models.no_drafter
  verify_fn: VerifyFn = verification.speculative_sampling
  temperature: float = 0.0
  rule_temperature: float | None = None
  top_k: int | None = None
  top_p: float | None = None
  min_p: float | None = None
  seed: int = 0
  batch_size: int = 32
  refill_size: int | None = None

  def __post_init__(self):
    name = getattr(self.verify_fn, '__name__', '')
    if name == 'greedy' and self.temperature:
      raise ValueError(
        'greedy verification decodes the argmax: it needs temperature 0, got '
        f'{self.temperature}'
      )
    for field in ('top_k', 'top_p', 'min_p'):
      share = getattr(self, field)
      if share is not None and not (self.temperature or self.rule_temperature):
        raise ValueError(
          f'{field} {share} changes nothing at temperature 0, which is greedy: '
          'bind a Decoding.temperature above 0, or leave it out'
        )
    for field in ('batch_size', 'refill_size'):
      size = getattr(self, field)
      if size is not None and (type(size) is not int or size < 1):
        raise ValueError(f'{field} should be a positive integer, got {size!r}')
    if not 0 <= self.seed < 2**32:
      raise ValueError(f'seed should be from 0 to 2**32 - 1, got {self.seed}')
    for temperature in (self.temperature, self.rule_temperature):
      self.sampled(1, temperature)  # Raises where a value is out of range.

  def sampled(self, vocab_size: int, temperature: float | None = None) -> Any:
    """How models are sampled."""
    return logits.standardize(
      temperature=self.temperature if temperature is None else temperature,
      top_k=self.top_k,
      top_p=self.top_p,
      min_p=self.min_p,
      vocab_size=vocab_size,
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan:
  """Everything about a decode but its weights.

  Attributes:
    model: the target by name.
    config: its sizes.
    target: its functions.
    drafting: the drafter.
    decoding: the choices.
    vocab_size: ids with a token.
    eos_id: ids that end a row.
    max_len: S, prompts included.
  """

  model: Model
  config: Config
  target: LanguageModel
  drafting: Drafting
  decoding: Decoding
  vocab_size: int
  eos_id: tuple[int, ...]
  max_len: int

  def shapes(self) -> Params:
    """Of all weights, as `jax.ShapeDtypeStruct`s."""
    drafter = self.drafting.config
    return Params(
      target=infer_models.param_shapes(self.config),
      drafter=() if drafter is None else infer_models.param_shapes(drafter),
    )


def plan(
  model: Model,
  config: Config,
  vocabulary: AnyVocabulary | None,
  decoding: Decoding,
  *,
  max_len: int,
) -> Plan:
  """Puts target and drafter together.

  Args:
    model: the target by name.
    config: its sizes.
    vocabulary: None in a dry run.
    decoding: the choices.
    max_len: S, prompts included.

  Raises:
    ValueError: if they do not fit together.
  """
  _check_relaxation(decoding)
  target = Target(
    config=config, vocabulary=vocabulary, sampled=decoding.sampled
  )
  return Plan(
    model=model,
    config=config,
    target=infer_models.language_model(config),
    drafting=decoding.make_drafter(target),
    decoding=decoding,
    vocab_size=target.vocab_size,
    eos_id=(-1,) if vocabulary is None else vocabulary.eos_ids or (-1,),
    max_len=max_len,
  )


def _check_relaxation(decoding: Decoding) -> None:
  """Raises ValueError for a lenience or a beta from which nothing follows.

  A rule is asked, since only gin knows with which arguments it will be called:
  does it accept a token with just under half of the mass with a greater chance
  than that, but never one without any?
  """
  sampled_at = decoding.rule_temperature
  if sampled_at or (sampled_at is None and decoding.temperature):
    return
  below_half = 0.5 - 2.0**-20
  probs = jnp.array([[1 - below_half, below_half], [1.0, 0.0]], jnp.float32)
  draft = Draft(
    tokens=jnp.ones((2, 1), jnp.int32),
    probs=None,
    lengths=jnp.ones(2, jnp.int32),
  )
  row_keys = jax.random.split(jax.random.key(0), 2)
  both = jnp.stack([probs, probs], axis=1)
  # A function of its own: gin's is the same whatever is bound, and `jit` would
  # not trace it again.
  ask = jax.jit(lambda *args: decoding.verify_fn(*args).accept_probs)
  soft, hard = ask(row_keys, draft, both)
  if soft[0] > below_half and not hard[0]:
    name = getattr(decoding.verify_fn, '__name__', 'the rule')
    raise ValueError(
      f'the lenience or beta of {name} changes nothing at temperature 0, where '
      'only the likeliest token is possible: take greedy or top_beta with '
      'Decoding.rule_temperature = 1.0, as verification/lenient_greedy.gin '
      'and verification/top_beta.gin do'
    )


def load(plan: Plan, mesh: Mesh) -> Params:
  """Reads the weights of both sides onto the mesh.

  Raises:
    ValueError: if they do not divide over it, or are of another shape.
  """
  mesh_lib.check_divides(
    mesh, plan.shapes().target, batch_size=plan.decoding.batch_size
  )
  drafting = plan.drafting
  drafter: Any = ()
  if drafting.model is not None and drafting.config is not None:
    drafter = infer_models.read_params(
      drafting.model, drafting.config, infer_models.drafter_shardings(mesh)
    )
  target = infer_models.read_params(
    plan.model, plan.config, infer_models.target_shardings(mesh)
  )
  return Params(target=target, drafter=drafter)


def programs(
  plan: Plan, params: Params, prompt: Prompt, mesh: Mesh
) -> Programs:
  """The compiled parts of the loop on a mesh, for refills like `prompt`."""
  decoding = plan.decoding
  return decode_many.compile_programs(
    params,
    prompt,
    target=plan.target,
    # One width always: else a row's last bits would depend on whether others
    # have a draft, and so on the shard and on where a restart began.
    drafter=plan.drafting.drafter._replace(may_abstain=False),
    verify_fn=decoding.verify_fn,
    logits_to_probs=decoding.sampled(
      plan.vocab_size, decoding.rule_temperature
    ),
    eos_id=plan.eos_id,
    max_len=plan.max_len,
    batch_size=decoding.batch_size,
    state_shardings=lambda state: mesh_lib.state_shardings(mesh, state),
    output_sharding=NamedSharding(mesh, PartitionSpec()),
  )


def refill_size(plan: Plan, mesh: Mesh) -> int:
  """Rows that are refilled at once: as asked for, or a quarter of the batch,
  rounded up to rows for all data-parallel devices."""
  decoding = plan.decoding
  if decoding.refill_size is not None:
    return decoding.refill_size
  parts = mesh.shape[mesh_lib.rules.DATA]
  quarter = -(-decoding.batch_size // 4)
  return min(decoding.batch_size, quarter + -quarter % parts)


def warm_up(programs: Programs, params: Params, prompt: Prompt) -> None:
  """Compiles the programs, by decoding a prompt of empty rows."""
  nothing = np.full(programs.batch_size, -1, np.int32)
  fresh = programs.init(params, np.uint32(0), prompt)
  state = programs.replace(programs.idle(fresh), fresh, nothing)
  jax.block_until_ready(programs.run(params, state, np.int32(1)))
