"""What can be done with examples: decode them in the refilled loop, search with
beams, or score their targets. Each is one bundle of functions."""

import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
from jax.sharding import NamedSharding, PartitionSpec

from specdec_jax.assembly import beam_drafting
from specdec_jax.base import Params, Prompt
from specdec_jax.contrib import speculative_beams
from specdec_jax.decoding import beam_search, scoring, speculative
from specdec_jax.decoding.program import Program
from specdec_jax.infer import decode_many, examples, records
from specdec_jax.infer.decoding import WITH_SCORES, Job
from specdec_jax.infer.examples import Row
from specdec_jax.measure import exact_bits
from specdec_jax.sharding import mesh as mesh_lib

# T5X's brevity penalty.
_ALPHA = 0.6


# From the weights, rows, and what counts how well the batch is used, to rows in
# any order, each with its output, which has `statistics`. Compiled.
Decode = Callable[
  [Params, Sequence[Row], decode_many.Utilisation], Iterator[tuple[Row, Any]]
]


class Strategy(NamedTuple):
  """A way to treat examples.

  Attributes:
    init: `(params, prompt, job)`: the caches, to tell their sizes.
    compile: `(job, params)`: compiles for them, and runs once.
    record: `(row, outputs, job)`: the line of an example, of the outputs of its
      rows.
  """

  init: Callable[[Params, Prompt, Job], Any]
  compile: Callable[[Job, Params], Decode]
  record: Callable[[Row, Sequence[Any], Job], records.Record]


def of(job: Job) -> Strategy:
  """Returns the strategy that a job asks for."""
  # `num_decodes` 1 is a search with one beam: T5X's default, and not greedy.
  if job.is_scored:
    return _SCORING
  return _LOOP if job.decoding.num_decodes is None else _BEAM_SEARCH


def _compile_loop(job: Job, params: Params) -> Decode:
  pack = examples.packer(job.layout)
  empty = pack([None] * job.refill_size)
  # One width always: else a row's last bits would depend on whether others have
  # a draft, and so on the shard and on where a restart began.
  drafter = job.decoder.drafter._replace(may_abstain=False)
  program = Program(
    method=dataclasses.replace(job.decoder.method, drafter=drafter),
    params=params,
    prompt=empty,
    max_len=job.max_len,
    places=functools.partial(mesh_lib.state_shardings, job.mesh),
  )
  everywhere = NamedSharding(job.mesh, PartitionSpec())
  if job.decoder.exact_bits:
    rows = jax.device_put(
      pack([None] * job.decoding.batch_size), mesh_lib.batch_sharding(job.mesh)
    )
    method, target = program.method, params.target
    exact_bits.check(method, target, rows, max_len=job.max_len)
  programs = program.refill(job.decoding.batch_size, everywhere)
  decode_many.warm_up(programs, params, empty)

  def decode(
    params: Params, rows: Sequence[Row], utilisation: decode_many.Utilisation
  ):
    seed = job.decoding.seed
    for row, output, _ in decode_many.decode(
      programs, params, seed, rows, pack=pack, utilisation=utilisation
    ):
      yield row, output

  return decode


def _compile_beam_search(job: Job, params: Params) -> Decode:
  search, settings = _search(job, job.targets_length)
  alpha = job.decoding.alpha
  generate = functools.partial(
    search.generate,
    **settings,
    alpha=_ALPHA if alpha is None else alpha,
    eos_id=job.decoder.method.eos_id,
    vocab_size=job.decoder.seen.vocab_size,
  )
  pack = examples.packer(job.layout)
  return _compile_whole(job, params, lambda rows: (pack(rows),), generate)


def _search(job: Job, max_new_tokens: int) -> tuple[Any, Mapping[str, Any]]:
  """Returns the module of a beam search, and arguments of its `init`.

  Without a draft too the beams of an example share a row of the cache, which is
  never reordered, unless the model takes no placements.
  """
  # For a dry run, too, which has no examples and asks for the caches alone.
  num_beams, target = job.decoding.num_decodes or 1, job.decoder.target
  # Both modules take these; the one with drafts takes two more.
  settings = {'target': target, 'num_beams': num_beams, 'max_len': job.max_len}
  drafter = beam_drafting.drafter(
    job.decoder, num_beams, job.decoding.draft_width
  )
  if target.gather is None and not drafter.gamma:
    return beam_search, settings
  return speculative_beams, settings | {
    # One width always, as in the loop.
    'drafter': drafter._replace(may_abstain=False),
    'max_new_tokens': max_new_tokens,
  }


def _init_beams(params: Params, prompt: Prompt, job: Job) -> Any:
  search, settings = _search(job, job.targets_length)
  return search.init(params, prompt, **settings)


def _compile_scoring(job: Job, params: Params) -> Decode:
  pack, layout = examples.packer(job.layout), job.layout
  return _compile_whole(
    job,
    params,
    lambda rows: (pack(rows), *examples.pack_targets(rows, layout)),
    functools.partial(scoring.score, target=job.decoder.target),
  )


def _compile_whole(
  job: Job,
  params: Params,
  pack: Callable[[Sequence[Row | None]], tuple[Any, ...]],
  function: Callable[..., Any],
) -> Decode:
  """Compiles `function(params, *packed)` for batches that end together."""
  # Rows are split over the devices, and results come to every process, each of
  # which makes all lines of a chunk.
  batch = mesh_lib.batch_sharding(job.mesh)
  batch_size = job.decoding.batch_size

  @functools.partial(
    jax.jit, out_shardings=NamedSharding(job.mesh, PartitionSpec())
  )
  def run(params: Params, packed: tuple[Any, ...]) -> Any:
    packed = jax.lax.with_sharding_constraint(packed, batch)
    return function(params, *packed)

  of = lambda params: lambda rows: jax.device_get(run(params, pack(rows)))
  of(params)([None] * batch_size)
  return lambda params, rows, utilisation: decode_many.decode_whole(
    of(params), rows, batch_size=batch_size, utilisation=utilisation
  )


_LOOP = Strategy(
  init=lambda params, prompt, job: speculative.init(
    params,
    jax.random.key(0),
    prompt,
    method=job.decoder.method,
    max_len=job.max_len,
  ),
  compile=_compile_loop,
  record=lambda row, outputs, job: records.of_samples(
    row, outputs, job.layout, with_scores=job.mode == WITH_SCORES
  ),
)
_BEAM_SEARCH = Strategy(
  init=_init_beams,
  compile=_compile_beam_search,
  record=lambda row, outputs, job: records.of_beams(
    row, outputs[0], job.layout, job.decoding.return_all_decodes
  ),
)
_SCORING = Strategy(
  init=lambda params, prompt, job: job.decoder.target.init(
    params.target, prompt, job.max_len
  ),
  compile=_compile_scoring,
  record=lambda row, outputs, job: records.of_score(
    row, outputs[0], job.layout
  ),
)
