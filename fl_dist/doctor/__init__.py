"""Whether a run will work on this machine or allocation, fast and with the same bits: checks that measure it."""
