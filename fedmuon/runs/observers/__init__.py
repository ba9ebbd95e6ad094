"""Observers of a run. Each measures, records or reports one thing that the loop need not know."""
