"""A run: its loop, its folder, and all that it saves."""
