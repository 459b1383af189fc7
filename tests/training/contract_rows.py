"""Rows of the core's tables of tests that are about `train` and `data`."""

# What a command needs at least.
REQUIRED_FLAGS = {
  'data prepare': ('--inputs', 'x', '--vocabulary', 'x', '--out', 'x'),
}
