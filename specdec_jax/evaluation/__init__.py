"""What a run is judged by, and how it is shown."""
