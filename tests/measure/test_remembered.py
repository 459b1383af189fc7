"""Choices of gamma that later runs go by."""

import datetime
import json

import pytest

from specdec_jax.measure import trials
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
  assert trials.recall(HERE) is None
  trials.remember(HERE, CHOICE)
  other = HERE | {'rows': '16'}
  assert trials.recall(other) is None
  trials.remember(other, ChosenGamma(gamma=0, sentence='it does not'))
  found = trials.recall(HERE)
  assert (found.gamma, found.break_even) == (3, 1.5)
  assert found.sentence.startswith('it pays (measured on 20')
  # A newer one takes its place.
  trials.remember(HERE, ChosenGamma(gamma=5, sentence=''))
  assert trials.recall(HERE).gamma == 5
  assert trials.recall(other).gamma == 0
  assert len(json.loads(path.read_text())) == 2
  assert [each.name for each in path.parent.iterdir()] == ['gammas.json']
  trials.forget()
  trials.forget()
  assert trials.recall(HERE) is None


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
  trials.remember(HERE, CHOICE)
  record = json.loads(path.read_text())
  if spoil is None:
    path.write_bytes(b'\xff{"half')
  else:
    spoil(record)
    path.write_text(json.dumps(record))
  assert trials.recall(HERE) is None
  trials.remember(HERE, CHOICE)
  assert trials.recall(HERE).gamma == 3
  assert len(json.loads(path.read_text())) == 1


def test_nothing_is_kept_where_nothing_can_be_written(path, monkeypatch):
  path.parent.parent.joinpath('file').write_text('')
  monkeypatch.setenv('XDG_CACHE_HOME', str(path.parent.parent / 'file'))
  trials.remember(HERE, CHOICE)
  assert trials.recall(HERE) is None
  trials.forget()
