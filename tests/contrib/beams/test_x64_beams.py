"""Beam search under 64-bit types: the same dtypes, and no other on the way."""

import functools

from experiments.beams import plain as reordering
from specdec_jax.base import Params
from specdec_jax.contrib.beams import beam_drafters as beams
from specdec_jax.contrib.beams import speculative_beams
from tests import slow
from tests.contracts import table_of_drafters as table
from tests.contracts.table_of_models import ROWS as MODELS
from tests.test_x64 import ENDS, check, prompt, prompt_for


@slow.parametrize('name', MODELS, now=['llama, later', 'T5 1.1'])
def test_every_model_in_beam_search(name):
  model, make_params = MODELS[name]
  search = functools.partial(
    reordering.generate, target=model, num_beams=2, vocab_size=6, **ENDS
  )
  check(search, Params(make_params()), prompt_for(name))


@slow.parametrize('kind', ['none', 'copied', 'model'], now=['model'])
def test_speculative_beams(kind):
  """With a network that reads positions and masks."""
  drafter = {
    'none': lambda: beams.none(2),
    'copied': lambda: beams.copied(2, gamma=2),
    'model': lambda: beams.of_model(
      table.LLAMA, gamma=2, width=3, eos_id=ENDS['eos_id']
    ),
  }[kind]()
  params = table.ROWS['autoregressive, Llama'].make_params()
  generate = functools.partial(
    speculative_beams.generate,
    target=table.LLAMA,
    drafter=drafter,
    num_beams=2,
    vocab_size=4,
    **ENDS,
  )
  check(generate, Params(params, params), prompt())
