"""Text to tokens and back: vocabularies, tasks, prompts, stop strings."""
