"""What a run leaves on disk: its folder, metrics, checkpoints; files that are complete or absent."""
