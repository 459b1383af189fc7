"""Rows of the core's tables of tests that are about `bench` and `calibrate`."""

# Commands that take the flags of models, sampling and prompts.
DECODING_COMMANDS = ['bench', 'calibrate']
