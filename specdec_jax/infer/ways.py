"""What can be done with examples: decode them, speculatively or plainly, search
with beams, or score their targets. Each is one bundle of functions."""

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from specdec_jax.assembly import beam_drafting
from specdec_jax.base import Params, Prompt
from specdec_jax.decoding import (
  beam_search,
  scoring,
  speculative,
  speculative_beams,
)
from specdec_jax.infer import decode_many, examples, records
from specdec_jax.infer import decoding as decoding_lib
from specdec_jax.infer.decoding import SCORE, Plan
from specdec_jax.infer.examples import Layout, Row
from specdec_jax.sharding import mesh as mesh_lib

# T5X's brevity penalty.
_ALPHA = 0.6


class Compiled(NamedTuple):
  """Compiled programs, with their weights.

  Attributes:
    warm_up: compiles.
    decode: `(rows, *, utilisation)`, see `decode_many.decode`: gives rows, in
      any order, each with its output, which has `statistics`.
  """

  warm_up: Callable[[], None]
  decode: Callable[..., Iterator[tuple[Any, Any]]]


class Way(NamedTuple):
  """A way to treat examples.

  Attributes:
    init: `(params, prompt, *, plan)`: the caches, to tell their sizes.
    compile: `(plan, params, layout, mesh) -> Compiled`.
    record: `(row, outputs, layout, plan)`: the line of an example, of the
      outputs of its rows.
  """

  init: Callable[..., Any]
  compile: Callable[[Plan, Params, Layout, Mesh], Compiled]
  record: Callable[[Row, Sequence[Any], Layout, Plan], dict[str, Any]]


def of(plan: Plan) -> Way:
  """The way that a plan asks for."""
  if plan.mode == SCORE:
    return _SCORE
  return _LOOP if plan.decoding.num_decodes is None else _BEAMS


def _compile_loop(
  plan: Plan, params: Params, layout: Layout, mesh: Mesh
) -> Compiled:
  pack = examples.packer(layout)
  empty = pack([None] * decoding_lib.refill_size(plan, mesh))
  programs = decoding_lib.programs(plan, params, empty, mesh)
  return Compiled(
    warm_up=functools.partial(decoding_lib.warm_up, programs, params, empty),
    decode=lambda rows, *, utilisation: (
      (row, output)
      for row, output, _ in decode_many.decode(
        programs,
        params,
        plan.decoding.seed,
        rows,
        pack=pack,
        utilisation=utilisation,
      )
    ),
  )


def _compile_beams(
  plan: Plan, params: Params, layout: Layout, mesh: Mesh
) -> Compiled:
  search, settings = _search(plan, layout.targets_length)
  alpha = plan.decoding.alpha
  generate = functools.partial(
    search.generate,
    **settings,
    alpha=_ALPHA if alpha is None else alpha,
    eos_id=plan.decoder.method.eos_id,
    vocab_size=plan.decoder.seen.vocab_size,
  )
  pack = examples.packer(layout)
  return _compile_whole(
    plan, params, lambda rows: (pack(rows),), generate, mesh
  )


def _search(plan: Plan, max_new_tokens: int) -> tuple[Any, dict[str, Any]]:
  """The module of a beam search, and arguments of its `init`.

  Without a draft too the beams of an example share a row of the cache, which is
  never reordered, unless the model takes no placements.
  """
  num_beams, target = plan.decoding.num_decodes or 1, plan.decoder.target
  settings = {
    'target': target,
    'num_beams': num_beams,
    'max_len': plan.max_len,
  }
  drafter = beam_drafting.drafter(
    plan.decoder, num_beams, plan.decoding.draft_width
  )
  if target.gather is None and not drafter.gamma:
    return beam_search, settings
  return speculative_beams, settings | {
    # One width always, as in `decoding.programs`.
    'drafter': drafter._replace(may_abstain=False),
    'max_new_tokens': max_new_tokens,
  }


def _init_beams(params: Params, prompt: Prompt, *, plan: Plan) -> Any:
  max_new_tokens = plan.max_len - prompt.decoder_tokens.shape[1]
  search, settings = _search(plan, max_new_tokens)
  return search.init(params, prompt, **settings)


def _compile_score(
  plan: Plan, params: Params, layout: Layout, mesh: Mesh
) -> Compiled:
  pack = examples.packer(layout)
  return _compile_whole(
    plan,
    params,
    lambda rows: (pack(rows), *examples.pack_targets(rows, layout)),
    functools.partial(scoring.score, target=plan.decoder.target),
    mesh,
  )


def _compile_whole(
  plan: Plan,
  params: Params,
  pack: Callable[[Sequence[Row | None]], tuple[Any, ...]],
  function: Callable[..., Any],
  mesh: Mesh,
) -> Compiled:
  """`function(params, *packed)` for batches that begin and end together."""
  batch = mesh_lib.batch_sharding(mesh)
  batch_size = plan.decoding.batch_size

  @functools.partial(
    jax.jit, out_shardings=NamedSharding(mesh, PartitionSpec())
  )
  def run(params: Params, packed: Any) -> Any:
    packed = jax.lax.with_sharding_constraint(packed, batch)
    return function(params, *packed)

  compute = lambda rows: jax.device_get(run(params, pack(rows)))
  return Compiled(
    warm_up=lambda: compute([None] * batch_size),
    decode=functools.partial(
      decode_many.decode_whole, compute, batch_size=batch_size
    ),
  )


_LOOP = Way(
  init=lambda params, prompt, *, plan: speculative.init(
    params,
    jax.random.key(0),
    prompt,
    method=plan.decoder.method,
    max_len=plan.max_len,
  ),
  compile=_compile_loop,
  record=lambda row, outputs, layout, plan: records.of_samples(
    row, outputs, layout, plan.mode
  ),
)
_BEAMS = Way(
  init=_init_beams,
  compile=_compile_beams,
  record=lambda row, outputs, layout, plan: records.of_beams(
    row, outputs[0], layout, plan.decoding.return_all_decodes
  ),
)
_SCORE = Way(
  init=lambda params, prompt, *, plan: plan.decoder.target.init(
    params.target, prompt, plan.max_len
  ),
  compile=_compile_score,
  record=lambda row, outputs, layout, plan: records.of_score(
    row, outputs[0], layout
  ),
)
