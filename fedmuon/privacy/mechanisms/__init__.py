"""What is released of the data: clipped sums and their noise."""
