"""The drafter `suffix`: texts that `Decoder.remember` adds to its pool."""

import jax
import numpy as np
import pytest

pytest.importorskip('safetensors')
pytest.importorskip('tokenizers')

import specdec_jax
from specdec_jax.text import text_files
from tests.assembly.tiny_api import NUM_NEW, TEXTS, generate


def test_what_is_remembered_is_copied(folder, completions, monkeypatch):
  decoder = specdec_jax.load(folder, drafter='suffix', gamma=4, pool_size=512)
  first = generate(decoder, TEXTS)
  tokens = [each.tokens for each in first]
  assert tokens == [each.tokens for each in completions]
  for each in first:
    assert each.context[-NUM_NEW:] == each.tokens

  def compile_nothing(self, *args):
    raise AssertionError('it is compiled already')

  monkeypatch.setattr(
    specdec_jax.decoding.program.Part, 'lower', compile_nothing
  )
  wiser = decoder.remember(each.context for each in first)
  num_runs = lambda found: [each.statistics['target_runs'] for each in found]
  again = generate(wiser, TEXTS)
  assert [each.tokens for each in again] == tokens
  # Of eight tokens, five and three, if the match is of the right text.
  assert sum(num_runs(again)) < 0.6 * sum(num_runs(first))
  assert num_runs(generate(decoder, TEXTS)) == num_runs(first)
  # Ids may come from an iterator, which is read once.
  same = decoder.remember(map(int, each.context) for each in first)
  pools = [each.params.drafter for each in (same, wiser)]
  jax.tree.map(np.testing.assert_array_equal, *pools)
  # Strings are remembered by their tokens.
  assert decoder.remember(['the in ab']).params.drafter.tokens.max() > 0


def test_who_does_not_remember_says_so(decoder):
  with pytest.raises(ValueError, match='suffix'):
    decoder.remember(['the in ab'])


@pytest.mark.parametrize(
  ('texts', 'message'),
  [
    ('the in ab', 'is a string'),
    ([5, 6], 'text 1 is neither a string nor ids: 5'),
    ([[1], [2, -1]], 'text 2 has ids'),
    ([[1], iter([2, -1])], 'text 2 has ids'),
    ([[1], [2, 10**6]], 'text 2 has ids'),
    ([[1], iter([2, 10**6])], 'text 2 has ids'),
  ],
)
def test_what_is_no_text_is_not_remembered(folder, texts, message):
  decoder = specdec_jax.load(folder, drafter='suffix')
  with pytest.raises(ValueError, match=message):
    decoder.remember(texts)


def test_a_text_is_read_once_for_all_gammas(folder, tmp_path, monkeypatch):
  (tmp_path / 'text').write_text('the in ab')
  read, paths = text_files.tokens_of_file, []
  monkeypatch.setattr(
    text_files,
    'tokens_of_file',
    lambda path, *args, **names: (
      paths.append(path) or read(path, *args, **names)
    ),
  )
  made = specdec_jax.load(
    folder, drafter='suffix', suffix_text=tmp_path / 'text'
  )
  pools = {id(each.params.drafter) for each in (made, made.at(3), made.sampled)}
  assert (len(paths), len(pools)) == (1, 1)


def test_all_gammas_have_what_is_remembered(folder):
  auto = specdec_jax.load(folder, drafter='suffix', gamma='auto', pool_size=64)
  one = auto.at(3)
  wiser = auto.remember(['the in ab'])
  assert wiser.at(3).params.drafter is wiser.params.drafter
  assert wiser.at(3).parts is one.parts
  assert wiser.programs is one.programs
  assert wiser.at(0).params.drafter == ()
  sampled = one.sampled
  wiser = one.remember(['the in ab'])
  assert wiser.sampled.params is wiser.params
  assert wiser.sampled.parts is sampled.parts
