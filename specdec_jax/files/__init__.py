"""Local files: paths, lines of JSON, folders that are whole or absent."""
