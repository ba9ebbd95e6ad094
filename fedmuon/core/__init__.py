"""The basis of all other packages: errors, keyed draws, files, locks, threads, tables."""
