"""A short run of the fuzzer, and that it sees what it is there to see."""

import sys

import pytest

from tests.fuzz import campaign, readers, seeds

pytestmark = pytest.mark.skipif(
  sys.platform != 'linux', reason='the worker watches files with inotify'
)


def test_damaged_files_are_read_or_refused(tmp_path):
  counts = campaign.run(
    list(readers.READERS),
    num_inputs=100 * len(readers.READERS),
    seed=0,
    findings=tmp_path,
  )
  table = campaign.format_table(counts)
  assert not campaign.num_undocumented(counts), (
    f'{table}\n{campaign.format_findings(tmp_path)}'
  )
  for row in counts.values():
    assert row['read'] + row['refused'] == 100, table
    assert min(row['read'], row['refused']) > 0, table


def test_every_fault_is_seen(tmp_path):
  """Of readers that go wrong, all but what is still read is a finding."""
  counts = campaign.run(
    list(readers.PLANTED),
    num_inputs=6 * len(readers.PLANTED),
    seed=0,
    findings=tmp_path,
    cpu_seconds=0.3,
  )
  table = campaign.format_table(counts)
  for outcome, row in counts.items():
    assert row['read'] + row[outcome] == 6, table
    assert row[outcome] > 0, table
  found = campaign.format_findings(tmp_path)
  assert 'error error KeyError  (--reader error --seed 0 --start' in found
  assert 'death death SIGABRT' in found


def test_an_input_is_a_function_of_the_seed_and_its_number(tmp_path):
  seeds.extract(tmp_path)
  for name in readers.READERS:
    one, other = (readers.Inputs(name, tmp_path) for _ in range(2))
    first = [one.at(1, k) for k in range(8)]
    assert [other.at(1, k) for k in range(8)] == first
    assert [other.at(2, k) for k in range(8)] != first
