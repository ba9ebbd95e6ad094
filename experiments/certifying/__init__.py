"""Certificates of the risk of a run's final model."""
