"""Files on disks and in buckets: paths, lines, folders whole or absent."""
