"""The Grid of Flower on Ray workers."""
