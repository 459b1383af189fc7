"""Pairs that come with the package, by their names on the command line."""

import functools
import json

import pytest

pytest.importorskip('sentencepiece')


import specdec_jax
from specdec_jax.assembly import packing, running, settled_gamma
from specdec_jax.assembly.gamma_memory import RememberedGamma

PROMPTS = {
  'ende': (
    'A small text editor for',
    'This package contains the',
    'summarize: This package contains the manual of the editor.',
  ),
  'lm': ('A small text editor for', 'This package contains the'),
}


@pytest.mark.slow
@pytest.mark.parametrize('pair', PROMPTS)
def test_a_pair_decodes_by_name(run, tmp_path, pair):
  """What the drafter changes is the number of target runs, not the text."""
  prompts = PROMPTS[pair]
  (tmp_path / 'prompts.txt').write_text('\n'.join(prompts) + '\n')
  records = []
  for drafting in (
    ('--draft_model', f'{pair}-nano', '--gamma', 3),
    ('--drafter', 'none'),
  ):
    result = run(
      *('generate', '--model', f'{pair}-mini', *drafting),
      *('--prompts', tmp_path / 'prompts.txt', '--batch_size', len(prompts)),
      *('--max_new_tokens', 20, '--json', tmp_path / 'out.jsonl'),
    )
    assert result.status == 0, result
    lines = (tmp_path / 'out.jsonl').read_text().splitlines()
    records.append([json.loads(line) for line in lines])
  drafted, plain = records
  assert len(drafted) == len(prompts)
  assert [r['tokens'] for r in drafted] == [r['tokens'] for r in plain]
  assert all(record['text'] for record in drafted)
  runs = [sum(r['statistics']['target_runs'] for r in rs) for rs in records]
  assert runs[0] < runs[1]


def test_a_gamma_needs_positions_of_the_drafter():
  load = functools.partial(
    specdec_jax.load,
    'ende-mini',
    drafter='spec_drafter',
    draft_model='ende-spec-drafter',
  )
  texts = specdec_jax.generate(load(gamma=5), ['A.'], max_new_tokens=480)
  with pytest.raises(ValueError, match=r'256 positions.*with gamma 5'):
    next(texts)
  # One that was remembered is for texts with room.
  auto = load()
  auto.gammas[1, 1] = RememberedGamma(gamma=23, source='bench')
  for num_new, gamma in ((200, 23), (240, 0)):
    settings = running.DecodeSettings(max_new_tokens=num_new)
    [batch] = packing.pack(auto, ['A.'], settings)
    settled = settled_gamma.settled(auto, batch, settings)
    assert settled.drafter.gamma == gamma
