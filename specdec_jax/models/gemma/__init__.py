"""Gemma 2, Gemma 3 (text) and T5Gemma."""
