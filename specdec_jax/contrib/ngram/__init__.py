"""Drafts from the counts of n-grams in a text file."""
