"""Beam search over examples, with the extra `contrib/beams`."""

import functools
from typing import Any

from specdec_jax.base import Params
from specdec_jax.contrib.beams import beam_drafting, speculative_beams
from specdec_jax.infer import examples, records
from specdec_jax.infer.decoding import Job
from specdec_jax.infer.strategies import Decode, Strategy, compile_whole

# T5X's brevity penalty.
_ALPHA = 0.6


def _compile(job: Job, params: Params) -> Decode:
  alpha = job.decoding.alpha
  generate = functools.partial(
    speculative_beams.generate,
    **_settings(job),
    alpha=_ALPHA if alpha is None else alpha,
    eos_id=job.decoder.method.eos_id,
    vocab_size=job.decoder.parts.target_info.vocab_size,
  )
  pack = examples.packer(job.layout)
  return compile_whole(job, params, lambda rows: (pack(rows),), generate)


def _settings(job: Job) -> dict[str, Any]:
  """Returns the arguments that a beam search and its `init` share."""
  # A dry run asks for the caches alone, and has no examples.
  num_beams = job.decoding.num_decodes or 1
  return {
    'target': job.decoder.target,
    'drafter': beam_drafting.drafter(
      job.decoder, num_beams, job.decoding.draft_width
    ),
    'num_beams': num_beams,
    'max_len': job.max_len,
    'max_new_tokens': job.targets_length,
  }


BEAM_SEARCH = Strategy(
  init=lambda params, prompt, job: speculative_beams.init(
    params, prompt, **_settings(job)
  ),
  compile=_compile,
  record=lambda row, outputs, job: records.of_beams(
    row, outputs[0], job.layout, job.decoding.return_all_decodes
  ),
)
