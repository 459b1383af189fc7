"""Blockwise heads (Stern et al., 2018): guesses for the next tokens."""
