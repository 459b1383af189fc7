"""Choices of gamma that later runs go by."""

import datetime
import json

import pytest

from specdec_jax.measure import remembered
from specdec_jax.theory.gamma_trials import ChosenGamma

HERE = {'device': 'one CPU', 'rows': '8'}
CHOICE = ChosenGamma(
  gamma=3, sentence='it pays', tokens_per_second={'0': 1.0}, break_even=1.5
)


@pytest.fixture
def path(tmp_path, monkeypatch):
  monkeypatch.setenv('XDG_CACHE_HOME', str(tmp_path))
  return tmp_path / 'specdec_jax' / 'gammas.json'


def test_a_choice_is_recalled_where_everything_is_the_same(path):
  assert remembered.recall(HERE) is None
  remembered.remember(HERE, CHOICE)
  other = HERE | {'rows': '16'}
  assert remembered.recall(other) is None
  remembered.remember(other, ChosenGamma(gamma=0, sentence='it does not'))
  found = remembered.recall(HERE)
  assert (found.gamma, found.break_even) == (3, 1.5)
  assert found.sentence.startswith('it pays (measured on 20')
  # A newer one takes its place.
  remembered.remember(HERE, ChosenGamma(gamma=5, sentence=''))
  assert remembered.recall(HERE).gamma == 5
  assert remembered.recall(other).gamma == 0
  assert len(json.loads(path.read_text())) == 2
  assert [each.name for each in path.parent.iterdir()] == ['gammas.json']
  remembered.forget()
  remembered.forget()
  assert remembered.recall(HERE) is None


def old(record):
  day = datetime.date.today() - datetime.timedelta(days=91)
  record[0]['date'] = day.isoformat()


@pytest.mark.parametrize(
  'spoil',
  [
    old,
    lambda record: record.append(3),
    lambda record: record[0].pop('where'),
    lambda record: record[0]['choice'].update(colour='red'),
    lambda record: record[0]['choice'].update(gamma='three'),
    None,
  ],
)
def test_what_is_old_or_no_such_file_is_written_anew(path, spoil):
  remembered.remember(HERE, CHOICE)
  record = json.loads(path.read_text())
  if spoil is None:
    path.write_bytes(b'\xff{"half')
  else:
    spoil(record)
    path.write_text(json.dumps(record))
  assert remembered.recall(HERE) is None
  remembered.remember(HERE, CHOICE)
  assert remembered.recall(HERE).gamma == 3
  assert len(json.loads(path.read_text())) == 1


def test_nothing_is_kept_where_nothing_can_be_written(path, monkeypatch):
  path.parent.parent.joinpath('file').write_text('')
  monkeypatch.setenv('XDG_CACHE_HOME', str(path.parent.parent / 'file'))
  remembered.remember(HERE, CHOICE)
  assert remembered.recall(HERE) is None
  remembered.forget()
