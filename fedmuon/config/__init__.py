"""The config of an experiment: typed tables, the meaning of keys, and their valid combinations."""
