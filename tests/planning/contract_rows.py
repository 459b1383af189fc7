"""Rows of the core's tables of tests that are about `plan`."""

from tests.files.server import NOWHERE

# Commands that name a bucket that does not exist.
BUCKET_COMMANDS = {'plan': ('plan', '--costs', NOWHERE, '--alpha=0.5')}
# A command that starts the TPU compiler.
ON_TPU = (
  *('plan', '--target', 't5_1_1_small', '--topology', 'v4:1x1x1'),
  *('--drafter', 'prompt_lookup'),
)
