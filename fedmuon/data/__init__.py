"""Read data sets, split them over clients, and create neighbours that differ in one sample."""

from fedmuon.data.readers import available, load, read

__all__ = ["available", "load", "read"]
