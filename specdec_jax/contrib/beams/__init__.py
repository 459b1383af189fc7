"""Beam search, and drafters that let one target call score several steps."""
