"""What decoding costs."""
