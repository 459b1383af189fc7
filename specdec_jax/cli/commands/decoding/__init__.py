"""Commands that decode, and that show or judge what was decoded."""
