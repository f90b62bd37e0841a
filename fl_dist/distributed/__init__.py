"""Process groups: which rank this is, how ranks connect, exchange messages and detect failures; devices and signals."""
