"""From choices to a decoder, for every door."""
