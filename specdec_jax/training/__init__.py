"""Losses, optimisers, the training step and its loop."""
