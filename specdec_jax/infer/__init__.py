"""Decoding many examples: chunks, restarts, reports, quality."""
