"""What a run tells: lines on the console, rows in metrics.jsonl, a mirror on W&B."""
