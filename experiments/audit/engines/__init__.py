"""Engines that are audited: of each a function that yields its ways."""
