"""The subcommands of `specdec`, a file each."""
