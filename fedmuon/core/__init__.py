"""Basic modules for all other packages: errors, random draws, files, locks, threads, tables."""
