"""Plots of the pages, drawn from rows."""
