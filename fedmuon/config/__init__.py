"""The experiment as typed tables: the keys, their meaning, and which may be combined."""
