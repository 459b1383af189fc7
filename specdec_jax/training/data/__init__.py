"""Token files and texts that models wrote, and batches of them for training."""
