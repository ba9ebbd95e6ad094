"""Samples: where they come from, who holds which, and the data sets that differ in one of them."""

from fedmuon.data.readers import available, load, read

__all__ = ["available", "load", "read"]
