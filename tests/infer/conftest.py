"""The fixtures of the tests of commands."""

from tests.cli.conftest import (  # noqa: F401
  _compilation_cache,
  cache_home,
  generate,
  make_model,
  model,
  prompts_file,
  run,
)
