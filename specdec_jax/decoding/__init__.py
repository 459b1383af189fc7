"""Decoding loops, each one compiled program."""
