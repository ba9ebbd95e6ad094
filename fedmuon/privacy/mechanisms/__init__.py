"""Releases of the data: clipped sums and their noise."""
