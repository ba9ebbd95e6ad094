"""Private mechanisms: how clipped sums and their noise are released."""
