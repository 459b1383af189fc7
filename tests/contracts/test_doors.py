"""Every door makes the same of the same choices: flags, gin files and Python.

All drafters are decoded with one lossless rule, and all rules with one drafter,
guesses at random, which are mostly wrong: a rule does not know which drafter it
is.
Flags, gin files (with the extra `infer`) and `specdec_jax.generate` decode each
of these cases, and `specdec_jax.stream` the draft model's.
tests/integrations/t5x/test_doors.py has T5X's `decode_fn`.
"""

import functools

import jax
import pytest

pytest.importorskip('gin')
pytest.importorskip('safetensors')
pytest.importorskip('sentencepiece')
pytest.importorskip('tensorstore')

import specdec_jax
from specdec_jax.assembly import packing, running, text_settings
from specdec_jax.assembly.drafters import DRAFTERS
from specdec_jax.assembly.rules import RULES
from specdec_jax.decoding import speculative
from tests import slow
from tests.cli import tiny
from tests.contracts.doors import (
  COMMANDS,
  EXTRA_NETWORKS,
  NUM_NEW,
  PLAIN,
  RULE_OPTIONS,
  SETTINGS,
  STREAMED,
  TEXTS,
  TREE_OPTIONS,
  TREE_RULES,
  Doors,
  case_of_drafter,
  case_of_rule,
  case_of_settings,
  check_same,
  num_accepted,
  row_of,
  target_of,
  write_models,
)


@pytest.fixture(scope='module')
def doors(tmp_path_factory) -> Doors:
  folder = tmp_path_factory.mktemp('doors')
  write_models(folder)
  return Doors(folder)


@pytest.fixture(autouse=True)
def _keep_small_programs(monkeypatch):
  """Doors share them; a command would keep only those that took long."""
  monkeypatch.setenv('JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS', '0')


@slow.parametrize(
  'name',
  DRAFTERS,
  now=['none', 'model'],
)
def test_all_doors_decode_the_same_with_a_drafter(name, doors, capfd):
  case = case_of_drafter(name)
  expected = doors('python', case, capfd)
  for door in (*COMMANDS, *(['stream'] if name == STREAMED else [])):
    check_same(door, doors(door, case, capfd), expected)
  # Lossless: the tokens are those of plain decoding.
  plain = case_of_drafter(PLAIN)._replace(target=case.target)
  plain = doors('python', plain, capfd)
  assert [each.tokens for each in expected] == [each.tokens for each in plain]
  assert bool(sum(each.num_drafted for each in expected)) == (
    name not in (PLAIN, 'grammar')
  )


@pytest.mark.slow
@pytest.mark.parametrize('name', TREE_OPTIONS)
def test_all_doors_draft_the_same_trees(name, doors, capfd):
  case = case_of_drafter(name, TREE_OPTIONS)
  expected = doors('python', case, capfd)
  for door in COMMANDS:
    check_same(door, doors(door, case, capfd), expected)
  plain = case_of_drafter(PLAIN)._replace(target=case.target)
  plain = doors('python', plain, capfd)
  assert [each.tokens for each in expected] == [each.tokens for each in plain]
  num_nodes = doors.load(case).drafter.gamma
  for each in expected:
    assert not each.num_drafted % num_nodes
  assert sum(each.num_drafted for each in expected)
  assert num_accepted(expected)


@pytest.mark.slow
@pytest.mark.parametrize('name', TREE_RULES)
def test_all_doors_judge_trees_by_a_named_rule(name, doors, capfd):
  case = case_of_drafter('model', TREE_OPTIONS, rule=name)
  expected = doors('python', case, capfd)
  for door in COMMANDS:
    check_same(door, doors(door, case, capfd), expected)
  plain = doors('python', case_of_drafter(PLAIN), capfd)
  assert [each.tokens for each in expected] == [each.tokens for each in plain]
  assert num_accepted(expected)


@pytest.mark.slow
@pytest.mark.parametrize(
  'name',
  sorted({*RULES} - {*TREE_RULES}),
)
def test_all_doors_decode_the_same_with_a_rule(name, doors, capfd):
  lossless, options, temperature = row_of(RULE_OPTIONS, 'rule', name)
  strict = doors('python', case_of_rule(name, lossless, 0.0), capfd)
  plain = doors('python', case_of_drafter(PLAIN), capfd)
  assert [each.tokens for each in strict] == [each.tokens for each in plain]
  # Its options have to arrive, and at temperature 1 the same draws be made.
  case = case_of_rule(name, options, temperature)
  expected = doors('python', case, capfd)
  for door in COMMANDS:
    check_same(door, doors(door, case, capfd), expected)
  if options != lossless:
    strict = case_of_rule(name, lossless, temperature)
    assert num_accepted(expected) > num_accepted(doors('python', strict, capfd))
  if temperature:
    assert [each.tokens for each in expected] != [each.tokens for each in plain]


@slow.parametrize(
  'settings', sorted({*SETTINGS} - {'usual'}), now=['processors']
)
def test_all_doors_change_logits_in_the_same_way(settings, doors, capfd):
  case = case_of_settings(settings, STREAMED)
  expected = doors('python', case, capfd)
  for door in ('stream', *COMMANDS):
    check_same(door, doors(door, case, capfd), expected)
  assert num_accepted(expected)
  tokens = [each.tokens for each in expected]
  if not case.temperature:
    plain = doors('python', case_of_settings(settings, PLAIN), capfd)
    assert tokens == [each.tokens for each in plain]
  # Those of a decoder that is told them with its texts. A door that drops one
  # would be seen: each changes a text.
  decoder = doors.load(case._replace(settings='usual'))
  told = SETTINGS[settings]
  usual = {'max_new_tokens': NUM_NEW, 'batch_size': len(TEXTS)}
  for name in (None, *told):
    kept = {key: value for key, value in told.items() if key != name}
    made = specdec_jax.generate(decoder, TEXTS, **usual, **kept)
    assert ([each.tokens for each in made] == tokens) == (name is None), name


def test_there_is_no_other_way():
  """A new setting of how tokens are drawn needs a place in `SETTINGS`."""
  grammars = {'regex', 'json_schema', 'grammar', 'grammar_limits'}
  told = {name for values in SETTINGS.values() for name in values}
  assert told == {*text_settings.NAMES} - grammars - {'temperature'}


@slow.parametrize(
  'name', sorted({*DRAFTERS} - {PLAIN}), now=['prompt_lookup', 'eagle']
)
def test_gamma_chooses_itself_with_every_drafter(name, doors):
  """Each gamma that is tried can be decoded with, and gamma 0 has no drafter,
  nor its weights."""
  case = case_of_drafter(name)
  options = tuple((dict(case.options) | {'gamma': 'auto'}).items())
  auto = doors.load(case._replace(options=options))
  gammas = auto.tried_gammas
  assert auto.is_auto
  assert auto.drafter.gamma == max(gammas) > 0
  assert len(gammas) >= 3
  assert not any((gammas[-1] + 1) % (gamma + 1) for gamma in gammas)
  settings = running.DecodeSettings(max_new_tokens=NUM_NEW)
  [batch] = packing.pack(auto, TEXTS[:1], settings)
  for gamma in gammas:
    decoder = auto.at(gamma)
    assert (decoder.drafter.gamma, decoder.is_auto) == (gamma, False)
    assert gamma or decoder.params.drafter == ()
    generate = functools.partial(
      speculative.generate,
      method=decoder.method,
      max_len=running.max_length(decoder, batch, NUM_NEW),
    )
    output = jax.eval_shape(
      generate, decoder.params, jax.random.key(0), batch.prompt
    )
    assert output.statistics.num_tested.shape == (1, gamma)


@pytest.mark.parametrize(
  'name',
  [
    'eagle',
    'spec_drafter',
    *(name for networks in EXTRA_NETWORKS for name in networks),
  ],
)
def test_a_drafter_says_what_kind_it_is(name, doors, capfd):
  folder = doors.folder
  path, target = str(folder / name), str(folder / target_of(name))
  models = ('--model', target, '--draft_model', path, '--drafter', 'model')
  tiny.assert_refused(
    tiny.run(capfd, 'generate', *models, '--prompt', 'a'),
    path,
    f'draft_model, with drafter {name}',
  )
  with pytest.raises(ValueError, match=f'draft_model, with drafter {name}$'):
    specdec_jax.load(target, drafter='model', draft_model=path)


def test_a_door_that_drops_an_option_is_caught(doors, capfd, monkeypatch):
  """The control: a door that forgets how lenient the rule is."""
  case = case_of_rule('greedy', RULE_OPTIONS['greedy'][1], 0.0)
  expected = doors('python', case, capfd)

  class Forgetful(Doors):
    def load(self, case):
      kept = [item for item in case.options if item[0] != 'lenience']
      return super().load(case._replace(options=tuple(kept)))

  forgetful = Forgetful(doors.folder)
  with pytest.raises(AssertionError):
    check_same('python', forgetful('python', case, capfd), expected)
