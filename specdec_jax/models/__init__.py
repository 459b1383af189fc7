"""The networks, their sizes by name, and what decoding sees of them."""
