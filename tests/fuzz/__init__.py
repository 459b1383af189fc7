"""Fuzzing of the readers; see `python -m tests.fuzz --help`."""
