"""Runs as one page of HTML that needs nothing else, or that follows them while they run."""
