"""The subcommands of `specdec`, one per file."""
