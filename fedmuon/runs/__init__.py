"""A run: its loop, its folder, and the files that it saves."""
