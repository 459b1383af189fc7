"""Commands that measure, predict and test."""
