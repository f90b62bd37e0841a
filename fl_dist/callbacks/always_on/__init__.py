"""Callbacks that every run has; a configuration does not list them."""
