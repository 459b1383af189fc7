"""Rows of the core's tables of tests that are about `trace`."""

from specdec_jax.cli.main import main
from tests.files.server import NOWHERE

# Commands that name a bucket that does not exist.
BUCKET_COMMANDS = {'trace': ('trace', NOWHERE)}


def show(path) -> None:
  """Shows a trace in each of its styles."""
  for style in ('lines', 'flow'):
    assert main(['trace', str(path), '--style', style]) == 0
