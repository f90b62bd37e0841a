"""Runs as one page of HTML that needs nothing else, or that follows them as they go on."""
