"""Samples: sources, partitions over clients, and data sets that differ in one sample."""

from fedmuon.data.readers import available, load, read

__all__ = ["available", "load", "read"]
