"""What is run: one file a subcommand."""
