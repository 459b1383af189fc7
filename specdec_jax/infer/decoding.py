"""How `infer` decodes: from a gin file's choices to compiled programs."""

import dataclasses
import itertools
from collections.abc import Callable, Iterator, Sequence
from functools import partial

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from specdec_jax.assembly import beam_drafting, rules, running
from specdec_jax.assembly import decoder as decoder_lib
from specdec_jax.assembly.decoder import Decoder
from specdec_jax.assembly.drafters import DrafterChoice, NoDrafter
from specdec_jax.assembly.models import Model
from specdec_jax.assembly.rules import Rule, SpeculativeSampling
from specdec_jax.assembly.sampling import Sampling
from specdec_jax.base import Params, Prompt, VerifyFn
from specdec_jax.infer import decode_many
from specdec_jax.infer.decode_many import Programs, Timed
from specdec_jax.infer.examples import Row
from specdec_jax.measure import trials
from specdec_jax.measure.trials import Visit
from specdec_jax.sharding import mesh as mesh_lib
from specdec_jax.theory import gamma_trials
from specdec_jax.theory.gamma_trials import ChosenGamma

# Of T5X's modes, the one that decodes nothing.
SCORE = 'score'
_SIZES = (
  *('batch_size', 'refill_size', 'num_samples'),
  *('num_decodes', 'draft_width'),
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Decoding:
  """How to decode; gin binds the fields.

  Attributes:
    make_drafter: gives the drafter, of `assembly.drafters`.
    make_rule: gives the acceptance rule, of `assembly.rules`.
    temperature: and `top_k`, `top_p`, `min_p`: see `assembly.sampling`.
    seed: of all draws; each example has its own stream.
    batch_size: rows decoded at once, on all chips together.
    refill_size: rows that are refilled at once; None for a quarter. All of them
      makes every batch wait for its slowest row.
    num_samples: decodes of each example, each with a random stream of its own.
    num_decodes: beams, if any, of beam search (`decoding.beam_search`), which
      takes the place of the loop; T5X's name.
    draft_width: nodes of a level that a draft model drafts for a beam search;
      None for twice `num_decodes`.
    alpha: of the brevity penalty of beam search; None for 0.6.
    return_all_decodes: whether all beams are written, the best last, or the
      best alone.
    verify_fn: a rule of your own, in place of `make_rule`.
    rule_temperature: of the target's distributions that `verify_fn` sees, if
      another than that of the sampling.
  """

  make_drafter: Callable[[], DrafterChoice] = NoDrafter
  make_rule: Callable[[], Rule] = SpeculativeSampling
  temperature: float = 0.0
  top_k: int | None = None
  top_p: float | None = None
  min_p: float | None = None
  seed: int = 0
  batch_size: int = 32
  refill_size: int | None = None
  num_samples: int = 1
  num_decodes: int | None = None
  draft_width: int | None = None
  alpha: float | None = None
  return_all_decodes: bool = False
  verify_fn: VerifyFn | None = None
  rule_temperature: float | None = None

  def __post_init__(self):
    for field in _SIZES:
      if (size := getattr(self, field)) is not None:
        running.check_count(field, size)
    running.check_seed(self.seed)
    self._check_decodes()
    self.rule().seen(self.sampling).check_is_used()

  def _check_decodes(self) -> None:
    if self.num_samples > 1 and not self.temperature:
      raise ValueError(
        f'num_samples {self.num_samples} at temperature 0, which is greedy, '
        'are all the same: give a temperature above 0, or num_decodes for the '
        'beams of a beam search'
      )
    if self.verify_fn is None:
      self.refuse('rule_temperature', reason='is of verify_fn: give that, too')
    else:
      self.refuse('make_rule', reason='stands beside verify_fn: give only one')
    if self.num_decodes is None:
      self.refuse(
        *('return_all_decodes', 'draft_width', 'alpha'),
        reason='is of beam search: give num_decodes as well; num_samples are '
        'always all written',
      )
      return
    if self.temperature or self.num_samples > 1:
      raise ValueError(
        f'num_decodes {self.num_decodes} is of beam search, which draws '
        f'nothing, and temperature is {self.temperature:g} and num_samples '
        f'{self.num_samples}: leave out num_decodes, or these two'
      )
    self.refuse(
      *('make_rule', 'verify_fn', 'refill_size'),
      reason=f'changes nothing in a beam search, num_decodes '
      f'{self.num_decodes}: leave it out',
    )
    if self.alpha is not None and not 0 <= self.alpha < float('inf'):
      raise ValueError(
        f'alpha should be finite and at least 0, got {self.alpha}'
      )

  def refuse(self, *names: str, reason: str) -> None:
    """Raises ValueError for a field of these that is not at its default."""
    for name in names:
      value, default = getattr(self, name), getattr(type(self), name)
      if name.startswith('make_'):
        value, default = value(), default()
      if value != default:
        raise ValueError(f'{name} {getattr(value, "__name__", value)} {reason}')

  @property
  def batch_examples(self) -> int:
    """How many examples fill a batch with their samples."""
    return -(-self.batch_size // self.num_samples)

  def within(self, num_rows: int) -> 'Decoding':
    """With a batch of at most so many rows."""
    refill_size = self.refill_size
    if refill_size is not None and refill_size <= self.batch_size:
      refill_size = min(refill_size, num_rows)
    return dataclasses.replace(
      self,
      batch_size=min(self.batch_size, num_rows),
      refill_size=refill_size,
    )

  @property
  def sampling(self) -> Sampling:
    return Sampling(
      temperature=self.temperature,
      top_k=self.top_k,
      top_p=self.top_p,
      min_p=self.min_p,
    )

  def rule(self) -> Rule:
    if self.verify_fn is None:
      return self.make_rule()
    return rules.Custom(
      function=self.verify_fn, temperature=self.rule_temperature
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan:
  """Everything about a decode but its weights: the params of `decoder` are
  shapes. `max_len` is S, prompts included; `mode` is T5X's."""

  decoder: Decoder
  decoding: Decoding
  max_len: int
  mode: str


def plan(
  model: Model,
  decoding: Decoding,
  *,
  max_len: int,
  mode: str,
  is_dry_run: bool = False,
) -> Plan:
  """Puts target and drafter together; a dry run reads no vocabulary. Raises
  ValueError if they do not fit together."""
  is_score = mode == SCORE
  if is_score:
    decoding.refuse(
      *('make_drafter', 'make_rule', 'verify_fn', 'temperature', 'num_samples'),
      *('num_decodes', 'refill_size'),
      reason='changes nothing in the mode score, which decodes nothing: leave '
      'it out',
    )
  decoder = decoder_lib.outline(
    model,
    drafter=decoding.make_drafter(),
    rule=decoding.rule(),
    sampling=decoding.sampling,
    is_dry_run=is_dry_run,
  )
  if decoding.num_decodes and not is_score:
    # It says what does not go together, before anything is loaded.
    beam_drafting.drafter(decoder, decoding.num_decodes, decoding.draft_width)
  return Plan(decoder=decoder, decoding=decoding, max_len=max_len, mode=mode)


def load(plan: Plan, mesh: Mesh) -> Params:
  """Reads the weights of both sides onto the mesh. Raises ValueError if they do
  not divide over it, or are of another shape."""
  shapes, batch_size = plan.decoder.params, plan.decoding.batch_size
  mesh_lib.check_divides(mesh, shapes.target, batch_size=batch_size)
  return decoder_lib.load(
    plan.decoder,
    target_shardings=partial(mesh_lib.parameter_shardings, mesh),
    drafter_shardings=partial(mesh_lib.drafter_shardings, mesh),
  ).params


def programs(
  plan: Plan, params: Params, prompt: Prompt, mesh: Mesh
) -> Programs:
  """The compiled parts of the loop on a mesh, for refills like `prompt`."""
  # One width always: else a row's last bits would depend on whether others
  # have a draft, and so on the shard and on where a restart began.
  drafter = plan.decoder.drafter._replace(may_abstain=False)
  return decode_many.compile_programs(
    params,
    prompt,
    method=dataclasses.replace(plan.decoder.method, drafter=drafter),
    max_len=plan.max_len,
    batch_size=plan.decoding.batch_size,
    state_shardings=partial(mesh_lib.state_shardings, mesh),
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


def schedule(
  decoder: Decoder, rows: Iterator[Row], batch_size: int
) -> tuple[Iterator[Row], tuple[int, ...], ChosenGamma | None]:
  """The examples again; the gammas that their first batches try, none unless
  gamma is 'auto'; and the choice where there are too few to try any."""
  if not decoder.is_auto:
    return rows, (), None
  gammas = decoder.tried_gammas
  needed = trials.num_batches_needed(gammas, batch_size)
  first = list(itertools.islice(rows, needed * batch_size))
  num_batches = len(first) // batch_size
  turns = trials.schedule(gammas, batch_size, num_batches)
  choice = None if turns else trials.too_short(gammas, num_batches)
  return itertools.chain(first, rows), turns, choice


def choose(
  gammas: Sequence[int], parts: Sequence[Timed], batch_size: int
) -> ChosenGamma:
  """What batches show, each decoded with its gamma."""
  visits: dict[int, list[Visit]] = {gamma: [] for gamma in gammas}
  for gamma, part in zip(gammas, parts, strict=True):
    visits[gamma].append(
      Visit(
        gamma=gamma,
        statistics=part.statistics,
        num_iterations=part.utilisation.num_iterations,
        fill_seconds=part.utilisation.fill_seconds,
        loop_seconds=part.utilisation.loop_seconds,
      )
    )
  found = [trials.trial(each, waits=False) for each in visits.values()]
  return gamma_trials.choose(found, batch_size)
