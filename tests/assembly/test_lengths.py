"""How much is drafted is one value, whatever options say it."""

import itertools

import jax
import pytest

from specdec_jax.assembly import decoder, lengths
from specdec_jax.assembly.drafters import PromptLookup
from specdec_jax.assembly.drafters.draft_model import DraftModel
from specdec_jax.assembly.lengths import Auto, Fixed
from specdec_jax.assembly.models import Model
from specdec_jax.base import Tree

# Options that exclude each other, and the value of each.
SAYINGS = {
  'auto': ({'gamma': 'auto'}, Auto((0, 1, 3, 7))),
  'tree': ({'tree': (0, 0, 1)}, Tree((0, 0, 1))),
  'copies': ({'num_continuations': 2}, Tree((0, 0, 1, 2, 3, 4))),
}


def test_a_number_is_a_fixed_gamma():
  assert lengths.of(gamma=3) == Fixed(3)
  assert lengths.depth(Fixed(3)) == lengths.fixed(Fixed(3)) == 3


@pytest.mark.parametrize('name', SAYINGS)
def test_each_option_has_its_value(name):
  options, expected = SAYINGS[name]
  found = lengths.of(**{'gamma': 3} | options)
  assert found == expected
  with pytest.raises(ValueError, match='of one gamma'):
    lengths.fixed(found)


def test_a_threshold_ends_chains_alone():
  model = Model(checkpoint='x')
  drafter = DraftModel(model=model, gamma=3, min_prob=0.5)
  assert drafter.length == Fixed(3)
  assert isinstance(DraftModel(model=model, min_prob=0.5).length, Auto)
  with pytest.raises(ValueError, match='min_prob ends chains, not trees'):
    _ = DraftModel(model=model, tree=4, min_prob=0.5).length


@pytest.mark.parametrize('pair', [*itertools.combinations(SAYINGS, 2)])
def test_two_options_contradict_each_other(pair):
  options = {'gamma': 3} | SAYINGS[pair[0]][0] | SAYINGS[pair[1]][0]
  with pytest.raises(ValueError, match='each say how much'):
    lengths.of(**options)


@pytest.mark.parametrize('shape', [4, (0, 0, 1, 3), [(0,), (1,), (0, 0)]])
def test_a_tree_may_be_said_in_three_ways(shape):
  found = lengths.of(gamma=3, tree=shape)
  assert isinstance(found, Tree)
  assert lengths.depth(found) <= 3


@pytest.mark.parametrize(
  'shape', [(-1, -1, 0), (0, (1,)), [('a',)], [[0], '0'], [(-1,)], (0, True)]
)
def test_a_tree_in_no_format_names_the_formats(shape):
  with pytest.raises(ValueError, match=r'a number of nodes, the parents of'):
    lengths.of(gamma=3, tree=shape)


def test_auto_is_as_wide_as_its_widest():
  drafter = PromptLookup(gamma='auto')
  made = decoder.outline(Model(checkpoint='lm-mini'), drafter=drafter)
  assert made.recipe.length == Fixed(max(drafter.length.gammas))
  assert made.at(1).recipe.length == Fixed(1)
  assert made.is_auto
  assert not made.at(1).is_auto


@pytest.mark.parametrize(('gamma', 'is_traced'), [(2, True), ('auto', False)])
def test_a_drafter_that_may_not_be_read_is_not_traced(gamma, is_traced):
  drafter = DraftModel(model=Model(checkpoint='lm-nano'), gamma=gamma)
  made = decoder.outline(Model(checkpoint='lm-mini'), drafter=drafter)
  assert jax.tree.leaves(made.shapes.drafter)
  assert (made.params.drafter == made.shapes.drafter) == is_traced
  assert made.params.target == made.shapes.target
