"""Commands that tests of options are about."""

from specdec_jax import lazy

# Those that take the flags of models, sampling and prompts.
DECODING_COMMANDS = ['generate']
for names in lazy.installed('tests.measure.contract_rows:DECODING_COMMANDS'):
  DECODING_COMMANDS += names
