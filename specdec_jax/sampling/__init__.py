"""How tokens are drawn: random keys, distributions, and what changes logits."""
