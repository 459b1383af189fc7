"""Rows of the core's tables of tests that are about `plan`."""

from tests.files.server import NOWHERE

# Commands that name a bucket that does not exist.
BUCKET_COMMANDS = {'plan': ('plan', '--costs', NOWHERE, '--alpha=0.5')}
