"""Corpora that everybody can have: text of Debian's archive."""
