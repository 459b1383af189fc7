"""Programs in an engine's own terms, one for each rejection."""
