"""Training runs: one file a model."""
