"""From choices to a decoder, for every entry point."""
