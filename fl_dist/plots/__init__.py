"""Plots for print, by matplotlib: the data of each client, the loss around models."""
