"""Beams are drafted by a model whose vocabulary is a part of the target's."""

import functools
import json

import jax
import numpy as np
import pytest

import specdec_jax
from specdec_jax.contrib.beams import beam_drafting, speculative_beams
from tests import toy
from tests.cli import tiny
from tests.models.test_draft_vocabulary import MAX_LEN, ROWS, write_ids


@pytest.mark.slow
def test_beams_are_drafted_from_it(tmp_path):
  target = tiny.write_model(tmp_path / 'target', seed=1)
  draft = tiny.write_model(tmp_path / 'draft', seed=1)
  write_ids(draft, json.dumps({'ids': [*range(3, 60)]}))

  def search(**options):
    decoder = specdec_jax.load(target, **options)
    return jax.jit(
      functools.partial(
        speculative_beams.generate,
        target=decoder.target,
        drafter=beam_drafting.drafter(decoder, num_beams=2),
        num_beams=2,
        max_len=MAX_LEN,
        eos_id=decoder.method.eos_id,
      )
    )(decoder.params, toy.prompt(ROWS, width=3))

  plain = search(drafter='none')
  found = search(draft_model=draft, gamma=3)
  np.testing.assert_array_equal(found.tokens, plain.tokens)
  assert np.sum(found.statistics.num_accepted) > 0
