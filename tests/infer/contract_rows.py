"""Rows of the core's tables of tests that are about `infer`."""

from tests.files.server import NOWHERE

# Commands that name a bucket that does not exist.
BUCKET_COMMANDS = {
  'eval': ('eval', NOWHERE),
  'merge': ('merge', NOWHERE),
  'gin file': ('infer', f'--gin_file={NOWHERE}.gin'),
}
# What a command needs at least.
REQUIRED_FLAGS = {'eval': ('x',)}
