"""How `infer` decodes: the options that gin binds, and the job made of them."""

import dataclasses
from collections.abc import Callable, Mapping

from jax.sharding import Mesh

from specdec_jax import lazy
from specdec_jax.assembly import decoder as decoder_lib
from specdec_jax.assembly import packing, rules, running
from specdec_jax.assembly.decoder import Decoder
from specdec_jax.assembly.drafters import DrafterChoice, NoDrafter
from specdec_jax.assembly.models import Model
from specdec_jax.assembly.text_settings import NAMES, TextSettings
from specdec_jax.infer.examples import Layout
from specdec_jax.sharding import mesh as mesh_lib
from specdec_jax.text import prompts

# T5X's modes. The second adds `scores` to a line; the last decodes nothing, and
# gives log-probabilities of the targets.
SCORE, WITH_SCORES = 'score', 'predict_with_aux'
MODES = ('predict', WITH_SCORES, SCORE)
_BEAM_SEARCH = 'specdec_jax.contrib.beams.beam_search'
_SIZES = (
  *('batch_size', 'refill_size', 'num_samples'),
  *('num_decodes', 'draft_width'),
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Decoding(TextSettings):
  """How to decode; gin binds the fields, and those of `TextSettings`, under one
  name.

  Attributes:
    make_drafter: returns the drafter, of `assembly.drafters`.
    make_rule: returns the acceptance rule, of `assembly.rules`; a user's own
      rule is a `rules.Custom`.
    seed: random seed; each example has its own stream.
    batch_size: rows decoded at once, on all chips together.
    refill_size: rows that are refilled at once; None for a quarter. With the
      batch size, every batch waits for its slowest row.
    num_samples: decodes per example, each with its own random stream.
    num_decodes: beams, if any, of beam search (`contrib.beams.beam_search`),
      which takes the place of the loop; T5X's name.
    draft_width: nodes of a level that a draft model drafts for a beam search;
      None for twice `num_decodes`.
    alpha: of the brevity penalty of beam search; None for 0.6.
    exact_bits: see `api.load`; plain decoding of the same bits is `NoDrafter`
      with the same gamma and tree, if the drafter reads no features.
    return_all_decodes: whether to write all beams, the best last, or only the
      best.
  """

  temperature: float = 0.0  # type: ignore[assignment]
  make_drafter: Callable[[], DrafterChoice] = NoDrafter
  make_rule: Callable[[], rules.Rule] = rules.SpeculativeSampling
  seed: int = 0
  batch_size: int = 32
  refill_size: int | None = None
  num_samples: int = 1
  num_decodes: int | None = None
  draft_width: int | None = None
  alpha: float | None = None
  exact_bits: bool = False
  return_all_decodes: bool = False

  def __post_init__(self):
    super().__post_init__()
    for field in _SIZES:
      if (size := getattr(self, field)) is not None:
        running.check_count(field, size)
    running.check_seed(self.seed)
    self._check_decodes()
    self.make_rule().judge(self.sampling).sampling.check_is_used()

  def _check_decodes(self) -> None:
    if not self.temperature and self.num_decodes is None:
      self.refuse(
        'num_samples',
        reason='at temperature 0, which is greedy, are all the same: give a '
        'temperature above 0, or num_decodes for the beams of a beam search',
      )
    if self.num_decodes is None:
      self.refuse(
        *('return_all_decodes', 'draft_width', 'alpha'),
        reason='is of beam search: give num_decodes as well',
      )
      return
    if not lazy.is_installed(_BEAM_SEARCH):
      raise ValueError(
        f'num_decodes {self.num_decodes} is a beam search, of the extra '
        'contrib/beams, whose folder is not in this installation'
      )
    self.refuse(
      *('temperature', 'num_samples', 'make_rule', 'refill_size', 'exact_bits'),
      reason='changes nothing in a beam search, which draws nothing: leave out '
      f'num_decodes {self.num_decodes}, or this',
    )
    if self.alpha is not None and not 0 <= self.alpha < float('inf'):
      raise ValueError(
        f'alpha should be finite and at least 0, got {self.alpha}'
      )

  def refuse(self, *names: str, reason: str) -> None:
    """Raises ValueError for a field of these that is not at its default."""
    # Compares what functions return, since functions themselves are not equal.
    for name in names:
      value, default = getattr(self, name), getattr(type(self), name)
      if name.startswith('make_'):
        value, default = value(), default()
      if value != default:
        raise ValueError(f'{name} {value} {reason}')

  @property
  def batch_examples(self) -> int:
    """How many examples fill a batch with their samples."""
    # 32 rows of 5 samples each: 7 examples, the last with 2 of its samples.
    return -(-self.batch_size // self.num_samples)

  @property
  def sampling(self) -> TextSettings:
    return TextSettings(**self.explicit())


@dataclasses.dataclass(frozen=True, kw_only=True)
class Job:
  """Everything about a decode but its examples and weights: the decoder's
  parameters are shapes, lengths count the most tokens of inputs and the most
  new ones, and `samplings` are those of `examples.samplings`."""

  decoder: Decoder
  decoding: Decoding
  inputs_length: int
  targets_length: int
  mode: str
  mesh: Mesh
  samplings: Mapping[str, TextSettings] | None = None

  @property
  def is_scored(self) -> bool:
    """Whether targets are scored, and nothing is decoded."""
    return self.mode == SCORE

  @property
  def max_len(self) -> int:
    """S, the tokens of a row, its prompt included."""
    width = prompts.decoder_width(self.decoder.config, self.inputs_length)
    return width + self.targets_length

  @property
  def layout(self) -> Layout:
    """The sizes of prompts; ValueError for a dry run, without a vocabulary."""
    samplings = self.samplings or {'{}': self.decoder.sampling}
    if self.is_scored:
      samplings = dict.fromkeys(samplings, TextSettings())
    return Layout(
      config=self.decoder.config,
      vocabulary=self.decoder.vocabulary,
      inputs_length=self.inputs_length,
      targets_length=self.targets_length,
      is_scored=self.is_scored,
      samplings=samplings,
    )

  @property
  def refill_size(self) -> int:
    """Rows refilled at once, by default a quarter for each device."""
    if self.decoding.refill_size is not None:
      return self.decoding.refill_size
    batch_size, parts = self.decoding.batch_size, self._num_parts
    # Of 10 rows on 2 devices: a quarter is 3, and 4 divides over both.
    quarter = -(-batch_size // 4)
    return min(batch_size, quarter + -quarter % parts)

  @property
  def _num_parts(self) -> int:
    """Devices that have rows of their own."""
    return self.mesh.shape[mesh_lib.rules.DATA]

  def for_examples(self, num_examples: int) -> 'Job':
    """Returns the job with a batch no larger than `num_examples` need."""
    # Of 5 rows on 4 devices: a batch of 8 at most, 2 for each.
    num_rows = num_examples * self.decoding.num_samples
    num_rows += -num_rows % self._num_parts
    size, refill_size = self.decoding.batch_size, self.decoding.refill_size
    if refill_size is not None and refill_size <= size:
      refill_size = min(refill_size, num_rows)
    decoding = dataclasses.replace(
      self.decoding, batch_size=min(size, num_rows), refill_size=refill_size
    )
    return dataclasses.replace(self, decoding=decoding)

  def at(self, gamma: int | None) -> 'Job':
    """Returns the job with another gamma than its own; see `Decoder.at`."""
    if gamma is None:
      return self
    return dataclasses.replace(self, decoder=self.decoder.at(gamma))


def outline(
  model: Model,
  decoding: Decoding,
  lengths: Mapping[str, int],
  mode: str,
  mesh: Mesh,
  *,
  is_dry_run: bool = False,
) -> Job:
  """Makes a job of target and drafter; ValueError if they do not fit. A dry run
  reads no vocabulary."""
  if mode not in MODES:
    raise ValueError(f'infer.mode is {mode!r}; there are {", ".join(MODES)}')
  if mode == SCORE:
    decoding.refuse(
      *('make_drafter', 'make_rule', 'num_samples', 'num_decodes'),
      *('refill_size', 'exact_bits', *NAMES),
      reason='changes nothing in the mode score, which decodes nothing: leave '
      'it out',
    )
  decoder = decoder_lib.outline(
    model,
    drafter=decoding.make_drafter(),
    rule=decoding.make_rule(),
    sampling=decoding.sampling,
    is_dry_run=is_dry_run,
    exact_bits=decoding.exact_bits,
  )
  needed = prompts.num_positions(
    decoder.config, lengths['inputs'], lengths['targets']
  )
  packing.tell_of_draft_model(decoder, needed)
  if decoder.auto is not None:
    width = prompts.decoder_width(decoder.config, lengths['inputs'])
    room = decoder.max_drafted - width - lengths['targets'] + 1
    gammas = tuple(n for n in decoder.auto.gammas if not n or n <= room)
    auto = dataclasses.replace(decoder.auto, gammas=gammas)
    decoder = dataclasses.replace(decoder, auto=auto)
  if decoding.num_decodes and mode != SCORE:
    from specdec_jax.contrib.beams import beam_drafting

    decoder = beam_drafting.settled(decoder, decoding.draft_width)
    # Made first: it refuses contradictory options before anything is loaded.
    beam_drafting.drafter(decoder, decoding.num_decodes, decoding.draft_width)
  return Job(
    decoder=decoder,
    decoding=decoding,
    inputs_length=lengths['inputs'],
    targets_length=lengths['targets'],
    mode=mode,
    mesh=mesh,
  )
