"""Networks that only draft for another."""
