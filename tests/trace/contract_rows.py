"""Rows of the core's tables of tests that are about `trace`."""

from tests.files.server import NOWHERE

# Commands that name a bucket that does not exist.
BUCKET_COMMANDS = {'trace': ('trace', NOWHERE)}
