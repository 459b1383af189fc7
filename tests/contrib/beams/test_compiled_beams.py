"""What the compiler makes of a beam search: no copy of a cache in its loop."""

import functools

import jax
import pytest

from specdec_jax.base import Params
from specdec_jax.contrib.beams import (
  beam_drafters,
  beam_search,
  speculative_beams,
)
from specdec_jax.models import families
from tests import slow
from tests.decoding.test_compilation import (
  CONFIG,
  GAMMA,
  MAX_LEN,
  cache_copies,
  cache_size,
  in_loops,
  optimized_hlo,
  prompt_of,
)

pytestmark = pytest.mark.optimized

BEAMS = {
  'no beams drafted': beam_drafters.none(4),
  'drafted beams': beam_drafters.of_model(
    families.language_model(CONFIG), gamma=GAMMA, width=8, eos_id=0
  ),
  'copied beams': beam_drafters.copied(4, gamma=GAMMA),
}


def beams_of(name: str, batch_size: int):
  """A speculative beam search with four beams: the function of params and of
  the state to begin with, and both of them."""
  target = families.language_model(CONFIG)
  networks = {'target': target, 'drafter': BEAMS[name]}
  shapes = families.param_shapes(CONFIG)
  params = Params(shapes, shapes)
  sizes = {'num_beams': 4, 'max_len': MAX_LEN // 4}
  state = jax.eval_shape(
    lambda params, prompt: speculative_beams.init(
      params, prompt, **networks, **sizes
    ),
    params,
    prompt_of(batch_size),
  )
  rules = beam_search.checked_rules(target, 4, 0.6, 0, None)
  run = functools.partial(speculative_beams.run, **networks, rules=rules)
  return run, params, state


# Names, batch sizes and functions that make the program of each.
PROGRAMS = [
  (name, batch_size, functools.partial(beams_of, name, batch_size))
  for name in BEAMS
  for batch_size in (1, 4)
]


@slow.parametrize(
  ('name', 'batch_size'),
  [('drafted beams', 1), ('copied beams', 2)],
  now=[('drafted beams', 1)],
)
def test_no_copied_cache_in_a_beam_search(name, batch_size):
  run, *arguments = beams_of(name, batch_size)
  lines = in_loops(optimized_hlo(jax.jit(run), *arguments))
  assert sum('dynamic-update-slice' in line for line in lines) >= 4
  assert cache_copies(lines, cache_size(batch_size)) == []
