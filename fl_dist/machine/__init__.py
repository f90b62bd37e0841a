"""The machine: which rank this is, how ranks meet, talk and end; signals, faults, what its processor can do."""
