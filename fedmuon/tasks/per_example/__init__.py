"""Per-example gradients of networks: clipping, ghost norms, and sums of clipped gradients."""
