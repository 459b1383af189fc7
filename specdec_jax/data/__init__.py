"""Text in and out: vocabularies."""
