"""Per-example gradients of networks: clipping, ghost norms, sums of clipped gradients."""
