"""Commands that make models, and what they are made of."""
