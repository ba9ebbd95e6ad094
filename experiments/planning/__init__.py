"""Estimate the cost of a run in advance, from its set-up and a short trial."""
