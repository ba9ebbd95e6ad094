"""Instruments for reorganizing the code: they use the command line and public names alone."""
