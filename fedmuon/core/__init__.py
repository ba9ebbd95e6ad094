"""What everything else stands on: errors, keyed draws, files, locks, threads, tables."""
