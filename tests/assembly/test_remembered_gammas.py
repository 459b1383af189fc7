"""Choices of gamma that later runs go by."""

import datetime
import json

import pytest

from specdec_jax.assembly import gamma_memory
from specdec_jax.assembly.gamma_memory import RememberedGamma

HERE = {'device': 'one CPU', 'rows': '8'}
CHOICE = RememberedGamma(
  gamma=3, source='bench', load=0.25, tokens_per_second={'0': 1.0}
)


@pytest.fixture
def path(tmp_path, monkeypatch):
  monkeypatch.setenv('XDG_CACHE_HOME', str(tmp_path))
  return tmp_path / 'specdec_jax' / 'gammas.json'


def test_a_choice_is_recalled_where_everything_is_the_same(path):
  assert gamma_memory.recall(HERE) is None
  gamma_memory.remember(HERE, CHOICE)
  other = HERE | {'rows': '16'}
  assert gamma_memory.recall(other) is None
  gamma_memory.remember(other, RememberedGamma(gamma=0, source='bench'))
  found = gamma_memory.recall(HERE)
  assert found == CHOICE
  today = datetime.date.today().isoformat()
  assert found.sentence == (
    f'gamma 3: bench chose 3 on {today}, at a load of 0.2 per core'
  )
  # A newer one takes its place.
  gamma_memory.remember(HERE, RememberedGamma(gamma=5, source='calibrate'))
  assert gamma_memory.recall(HERE).gamma == 5
  assert gamma_memory.recall(other).gamma == 0
  assert len(json.loads(path.read_text())) == 2
  assert [each.name for each in path.parent.iterdir()] == ['gammas.json']
  gamma_memory.forget()
  gamma_memory.forget()
  assert gamma_memory.recall(HERE) is None


def old(record):
  day = datetime.date.today() - datetime.timedelta(days=91)
  record[0]['choice']['date'] = day.isoformat()


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
  gamma_memory.remember(HERE, CHOICE)
  record = json.loads(path.read_text())
  if spoil is None:
    path.write_bytes(b'\xff{"half')
  else:
    spoil(record)
    path.write_text(json.dumps(record))
  assert gamma_memory.recall(HERE) is None
  gamma_memory.remember(HERE, CHOICE)
  assert gamma_memory.recall(HERE).gamma == 3
  assert len(json.loads(path.read_text())) == 1


def test_a_gamma_of_0_is_reported_as_a_choice():
  choice = RememberedGamma(
    gamma=0, source='bench', date='2026-11-29', load=None
  )
  assert choice.sentence == 'plain decoding: bench chose 0 on 2026-11-29'


def test_nothing_is_kept_where_nothing_can_be_written(path, monkeypatch):
  path.parent.parent.joinpath('file').write_text('')
  monkeypatch.setenv('XDG_CACHE_HOME', str(path.parent.parent / 'file'))
  gamma_memory.remember(HERE, CHOICE)
  assert gamma_memory.recall(HERE) is None
  gamma_memory.forget()
