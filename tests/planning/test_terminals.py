"""What a file of costs says cannot command a terminal."""

import json

from specdec_jax.cli.main import main
from specdec_jax.files.replacing import write_text
from tests.cli.test_terminals import (  # noqa: F401
  NAME,
  SHOWN,
  assert_harmless,
  on_terminal,
)


def test_figures_of_a_file(
  on_terminal,  # noqa: F811
  tmp_path,
):
  terminal = on_terminal()
  costs = {
    'kind': 'specdec costs',
    'source': NAME,
    'model': '[/red]',
    **dict.fromkeys(('drafter', 'dtype', 'device'), NAME),
    **{'batch_size': 1, 'widths': [1, 3], 'target_seconds': [1.0, 1.1]},
    **{'first_draft_seconds': 0.1, 'draft_seconds': 0.1},
    **{'loop_seconds': 0.0, 'c_hat': 0.1},
  }
  path = tmp_path / 'costs.json'
  write_text(path, json.dumps(costs))
  assert main(['plan', '--costs', str(path), '--alpha', '0.5']) == 0
  assert SHOWN in terminal.text()
  assert '[/red]' in terminal.text()
  assert_harmless(terminal.text())
