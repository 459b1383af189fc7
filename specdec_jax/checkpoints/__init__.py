"""Checkpoints of other systems, read and written."""
