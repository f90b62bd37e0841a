"""Runs as a table and as curves, as papers print them."""
