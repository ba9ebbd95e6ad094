"""A page on this machine alone that follows runs while they last."""
