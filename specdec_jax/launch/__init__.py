"""What a run begins with: gin files, processes, progress."""
